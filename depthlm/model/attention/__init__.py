"""The mixers of layers over the sequence, as the backbone names them."""

from collections.abc import Iterable, Sequence

from depthlm.model.attention.delta import DeltaAttention
from depthlm.model.attention.self_attention import AttentionFactory, SelfAttention
from depthlm.model.shape import Backbone, Size, SublayerSpec

Mixer = SelfAttention | DeltaAttention


def build_mixers(size: Size, backbone: Backbone, attention: AttentionFactory, loops: int) -> list[Mixer]:
    """Return the mixers of all layers. An attention counts only the layers that have keys and values."""
    names = backbone.mixers_of(size.num_layers)
    kept = [name for name in names if name != "delta"]
    specs = iter(SublayerSpec(i, "attention", len(kept), loops, mixer) for i, mixer in enumerate(kept))
    return [
        DeltaAttention(size, backbone) if name == "delta" else attention(next(specs), size, backbone) for name in names
    ]


def attention_class(mixers: Iterable[Mixer]) -> type[SelfAttention]:
    """Return the class of the attentions; that of vanilla decoders if no layer has keys and values."""
    return next((type(mixer) for mixer in mixers if isinstance(mixer, SelfAttention)), SelfAttention)


def attention_positions(mixers: Sequence[Mixer], loops: int) -> list[int]:
    """Return the unrolled positions of the layers with keys and values, in the order in which they run."""
    kept = [layer for layer, mixer in enumerate(mixers) if isinstance(mixer, SelfAttention)]
    return [loop * len(mixers) + layer for loop in range(loops) for layer in kept]
