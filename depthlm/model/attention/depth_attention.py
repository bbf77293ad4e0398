"""Depth-Attention (arXiv 2606.05014): the value of a layer is mixed with those of earlier layers, by attention along
depth, before attention over the sequence.

Shapes: b batch, t new tokens, h query heads, k key/value heads, n sources and self, e head size.
"""

import torch
from torch import Tensor

from depthlm.model.attention.self_attention import Depth, SelfAttention, Update, causal_attention
from depthlm.model.place import Place
from depthlm.model.settings import at_least, one_of
from depthlm.model.shape import Backbone, Size


class DepthAttention(SelfAttention):
    """At every position and key/value head (section 3.2):

    qbar = mean of the head's queries;  alpha = softmax_j(qbar . k_j / sqrt(e)) over the sources j and this layer
    vmix = sum_j alpha_j v_j, with v_j the mixed value of source j and this layer's own v

    depth: (k_j, v_j) of earlier layers --.
    q, k, v -----> q, k ------------------+-> alpha -> vmix -> causal attention with q, k, vmix
                   `------------------------------------------^    `-> (k, vmix), a source of later layers

    No parameters. The mixed value takes the value's place in the KV cache, so generation holds nothing else.

    stride: s; None: L / 2.
    sources: anchored, every layer with index % s == 0 before this one; relative, layers l-s, l-2s, ... In a looped
        decoder also this layer's own (k, v) of earlier loops.
    mixing: softmax, or uniform weights.
    mixes: value, key or key_value; a source's key and value are those that its own attention saw.
    """

    def __init__(
        self,
        place: Place,
        size: Size,
        backbone: Backbone,
        stride: int | None = None,
        sources: str = "anchored",
        mixing: str = "softmax",
        mixes: str = "value",
    ):
        super().__init__(place, size, backbone)
        at_least(1, stride=stride)
        one_of(("anchored", "relative"), sources=sources)
        one_of(("softmax", "uniform"), mixing=mixing)
        one_of(("value", "key", "key_value"), mixes=mixes)
        self.stride = stride or max(1, place.num_layers // 2)
        self.anchored, self.mixing, self.mixes = sources == "anchored", mixing, mixes

    def source_layers(self, layer: int) -> range:
        """The layers of the same loop that a layer reads, ascending."""
        return range(0 if self.anchored else layer % self.stride, layer, self.stride)

    def is_source(self) -> bool:
        """Whether a later pass or layer reads this one."""
        later = range(self.place.layer + 1, self.place.num_layers)
        return self.place.loops > 1 or any(self.place.layer in self.source_layers(layer) for layer in later)

    def attend(self, projected: tuple[Tensor, ...], depth: Depth, update: Update | None) -> tuple[Tensor, Depth]:
        q, k, v = projected
        # one entry a layer passed, empty where nobody reads it: its place in the list tells the layer and the loop
        num_layers, passed = self.place.num_layers, len(depth)
        loop_start = passed - self.place.layer
        own = range(self.place.layer, loop_start, num_layers)
        sources = [depth[loop_start + j] for j in self.source_layers(self.place.layer)] + [depth[p] for p in own]
        if sources:
            alpha = self.weights(q, k, [key for key, _ in sources])
            if self.mixes != "value":
                mixed = mix(alpha, [key for key, _ in sources], k)
            if self.mixes != "key":
                v = mix(alpha, [value for _, value in sources], v)
            if self.mixes != "value":
                k = mixed
        depth = [*depth, (k, v) if self.is_source() else ()]
        return causal_attention(q, k, v, update), depth

    def weights(self, q_bhte: Tensor, k_bkte: Tensor, source_keys: list[Tensor]) -> Tensor:
        """alpha_nbkt1 of the sources, in their order, and of this layer."""
        keys = [*source_keys, k_bkte]
        if self.mixing == "uniform":
            return k_bkte.new_full((len(keys), 1, 1, 1, 1), 1 / len(keys))
        exact = torch.promote_types(q_bhte.dtype, torch.float32)
        qbar_bkte = q_bhte.unflatten(1, (k_bkte.shape[1], -1)).mean(2, dtype=exact)
        scores = torch.stack([(qbar_bkte * key).sum(-1, keepdim=True) for key in keys])
        return (scores * self.head_size**-0.5).softmax(0).to(k_bkte.dtype)

    def num_mixed(self) -> float:
        """Sources and self that this layer mixes, as a mean over the loops; 0 where it has no source."""
        inside = len(self.source_layers(self.place.layer))
        counts = [inside + loop for loop in range(self.place.loops)]
        return sum(count + 1 for count in counts if count) / self.place.loops

    def forward_flops(self, length: int, causal: bool) -> float:
        own = 4.0 * self.num_kv_heads * self.head_size * self.num_mixed()
        return super().forward_flops(length, causal) + own

    def io_values(self) -> float:
        """Keys and values of sources and self read, a value written in every layer (appendix B.2, equation 6)."""
        return self.num_kv_heads * self.head_size * (2 * self.num_mixed() + 1)


def mix(alpha_nbkt1: Tensor, sources: list[Tensor], own_bkte: Tensor) -> Tensor:
    """sum_j alpha_j x_j over the sources and this layer's own."""
    mixed = alpha_nbkt1[-1] * own_bkte
    for alpha, x in zip(alpha_nbkt1[:-1], sources, strict=True):
        mixed = torch.addcmul(mixed, alpha, x)
    return mixed
