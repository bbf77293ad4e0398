"""Logits and all gradients equal, in float64, those of a slow decoder that was written from the formulas."""

from functools import partial

import pytest
import torch

from depthlm.model.decoder import Decoder
from depthlm.model.parameters import initialize
from depthlm.model.shape import Size

from ..pairs import covering
from .literal.classes import CLASSES
from .literal.decoder import literal_logits

GRN = {"separate_qkv": False}
IDENTITY = {"start": "identity"}
TWO_STREAMS = {"num_streams": 2}
# what models ship with
INKLING = {"block_size": 3, "key_norm": "plain", "values": "normed", "scale": True}
DEEPSEEK = {"norm": "plain", "pre_eps": 1e-6, "res_eps": 1e-6, "start": "zero"}

# (connection, its settings), each on qwen3
CONNECTION_SETTINGS = [
    ("residual", {}),
    ("denseformer", {}),
    ("denseformer", {"period": 2, "dilation": 3}),
    ("attention_residuals", {}),
    ("attention_residuals", {"block_size": 3, "norm_eps": 1e-2}),
    ("attention_residuals", {"block_size": 3, "query": "input_dependent"}),
    ("attention_residuals", {"block_size": 3, "mixing": "sigmoid"}),
    ("attention_residuals", {"block_size": 3, "mixing": "scalars"}),
    ("attention_residuals", {"query": "input_dependent", "mixing": "sigmoid", "key_norm": "none"}),
    ("attention_residuals", INKLING | {"separate_qkv": 2}),
    ("attention_residuals", {"block_size": 3, "separate_qkv": [0, 2], "scale": True}),
    ("attention_residuals", {"block_size": 1, "window": 3}),
    ("attention_residuals", {"block_size": 3, "window": 1, "separate_qkv": 2}),
    ("attention_residuals", {"block_size": 3, "heads": 7, "scale": True}),
    ("attention_residuals", {"heads": 2, "query": "input_dependent", "mixing": "sigmoid", "key_norm": "none"}),
    ("attention_residuals", INKLING | {"separate_qkv": 2} | IDENTITY),
    ("attention_residuals", {"block_size": 1, "window": 2, "heads": 4} | IDENTITY),
    ("attention_residuals", {"block_size": 3, "mixing": "scalars"} | IDENTITY),
    ("attention_residuals", {"block_size": 3, "routing": "additive"}),
    ("attention_residuals", INKLING | {"separate_qkv": 2, "routing": "additive"}),
    ("attention_residuals_recency", {}),
    ("attention_residuals_recency", {"block_size": 3} | IDENTITY),
    ("attention_residuals_recency", {"block_size": 3}),
    ("dca", GRN),
    ("dca", GRN | {"version": 1}),
    ("dca", GRN | {"version": 2}),
    ("dca", GRN | {"w": "shared", "gate": "printed"}),
    ("dca", GRN | {"version": 1, "last_k": 2}),
    ("dca", {}),
    ("dca", {"last_k": 2}),
    ("dca", {"last_k": 1, "own_embedding": False}),
    ("dca", {"w": "shared", "gate": "printed", "last_k": 1}),
    ("hyper_connections", {}),
    ("hyper_connections", {"num_streams": 3, "dynamic": False}),
    ("hyper_connections", {"num_streams": 3, "collapse": "learned"}),
    ("hyper_connections", {"num_streams": 3, "collapse": "sum"}),
    ("mhc", {}),
    ("mhc", {"num_streams": 3, "iterations": 5, "collapse": "sum"}),
    ("mhc", {"num_streams": 2, "iterations": 5, "collapse": "learned"}),
    ("mhc", DEEPSEEK | {"collapse": "gated"}),
    ("mhc", {"residual": "identity", "norm": "plain", "pre_eps": 1e-6, "post_eps": 1e-6, "collapse": "gated"}),
    ("mhc", {"num_streams": 1, "residual": "identity", "post_scale": 1.5}),
    ("mhc", {"num_streams": 3, "residual": "permutations"}),
    ("mhc", {"num_streams": 8, "residual": "kronecker"}),
    ("mhc", DEEPSEEK | {"read": "previous", "collapse": "last", "norm_eps": 1e-20}),
    ("mhc", {"num_streams": 2, "residual": "identity", "read": "previous"}),
    ("qwen4_exp", {"rank": 5}),
    ("wide_residual", {}),
    ("altup", {"num_streams": 3}),
    ("backout", {}),
    ("gated_residual", {}),
    ("gated_residual", {"form": "token"}),
    ("embedding_skip", {}),
    ("unet_skip", {}),
    ("layer_scale", {"start": 0.5}),
    ("layer_scale", {"form": "affine"}),
    ("deepnorm", {}),
    ("deepnorm", {"form": "keel"}),
    ("siamese_norm", {}),
    ("ddl", {}),
    ("mudd", {}),
    ("mudd", {"layers": 1, "sources": [0, 2]}),
    ("mudd", {"sources": 2}),
    ("laurel", {}),
    ("laurel", {"rank": 2, "last_k": 1}),
    ("laurel", {"variant": "rw"}),
    ("laurel", {"variant": "lr", "rank": 3}),
    ("rezero", {}),
    ("highway", {}),
    ("depth_dense", {}),
    ("depth_qkv", {}),
    ("mrla", {}),
]
# (attention, its settings), each on qwen3
ATTENTION_SETTINGS = [
    ("depth_attention", {}),
    ("depth_attention", {"stride": 1}),
    ("depth_attention", {"sources": "relative"}),
    ("depth_attention", {"sources": "relative", "stride": 1}),
    ("depth_attention", {"stride": 1, "mixing": "uniform"}),
    ("depth_attention", {"stride": 1, "mixes": "key"}),
    ("depth_attention", {"stride": 1, "mixes": "key_value"}),
    ("depth_attention", {"stride": 1, "mixes": "key_value"} | IDENTITY),
    ("depth_attention", {"sources": "relative", "mixing": "uniform"} | IDENTITY),
    ("value_residual", {}),
    ("value_residual", {"weights": "fixed"}),
    ("shared_kv", {}),
    ("shared_kv", {"reuse": "upper_half"}),
    ("shared_kv", {"reuse": "last_k"}),
    ("shared_kv", {"reuse": "last_k", "last_k": 1}),
    ("moda", {}),
    ("moda", {"ffn_kv": False}),
    ("moda", {"depth_kv": False}),
    ("moda", {"attn_kv": True}),
    ("moda", {"attn_kv": True, "last_layer_kv": True}),
    ("moda", {"slots": 3}),
    ("moda", {"slots": 1, "attn_kv": True}),
    ("moda", {"slots": 2, "ffn_kv": False}),
    ("moda", {"attn_kv": True, "slots": 3} | IDENTITY),
]
# one of each mechanism, for the backbones and the loops
CONNECTION_OF_EACH = [
    ("residual", {}),
    ("denseformer", {"dilation": 2}),
    ("attention_residuals", {"block_size": 3}),
    ("attention_residuals_recency", {"block_size": 2}),
    ("dca", GRN),
    ("dca", {}),
    ("hyper_connections", TWO_STREAMS),
    ("mhc", TWO_STREAMS | {"iterations": 3}),
    ("laurel", {"rank": 2}),
]
ATTENTION_OF_EACH = [
    ("depth_attention", {"stride": 1}),
    ("moda", {}),
    ("moda", {"attn_kv": True}),
]
CROSSED = [
    (("mhc", TWO_STREAMS | {"iterations": 3}), ("depth_attention", {})),
    (("dca", {}), ("moda", {"attn_kv": True})),
    (("denseformer", {}), ("depth_attention", {"stride": 1, "mixes": "key_value"})),
    (("attention_residuals", {"block_size": 2}), ("moda", {})),
    (("hyper_connections", TWO_STREAMS), ("moda", {"slots": 3})),
    (("dca", {"last_k": 1}), ("depth_attention", {"sources": "relative", "stride": 1})),
    (("attention_residuals_recency", {}), ("depth_attention", {"stride": 1})),
    (("laurel", {}), ("moda", {"ffn_kv": False})),
]
PLAIN, SELF = ("residual", {}), ("self_attention", {})


# changes of qwen3: the layers' mixers, and the norms
MIXED = {
    "delta": {"mixers": ["delta"]},
    "latent": {"mixers": ["latent"], "position": "none"},
    "delta and latent": {"mixers": ["delta", "latent"], "position": "none"},
    "latent, delta and attention": {"mixers": ["latent", "delta", "attention"], "position": "none"},
    "delta and attention": {"mixers": ["attention", "delta", "delta"]},
    "both": {"norm_placement": "both"},
    "none": {"norm_placement": "none"},
}


def case(connection=PLAIN, attention=SELF, backbone="qwen3", loops=1, num_layers=4, heads=(2, 1)):
    parts = []
    for name, settings in (connection, attention):
        values = [f"{key}={value}" for key, value in settings.items()]
        parts.append(f"{name}({','.join(values)})" if values else name)
    label = " ".join(part for part in parts if part not in ("residual", "self_attention")) or "vanilla"
    label += f" {backbone} {loops}x{num_layers} {heads[0]}:{heads[1]}"
    return pytest.param(connection, attention, backbone, loops, num_layers, heads, id=label)


CASES = [
    # the formulas of streams start again from the embedding at every sublayer, which takes long in four layers
    *(
        case(one, num_layers=2 if one[0] in ("hyper_connections", "mhc", "qwen4_exp", "altup") else 4)
        for one in CONNECTION_SETTINGS
    ),
    *(case(attention=attention) for attention in ATTENTION_SETTINGS),
    *(case(connection, attention, num_layers=3) for connection, attention in CROSSED),
    *(case(connection, loops=2, num_layers=2) for connection in CONNECTION_OF_EACH[::3]),
    *(case(attention=attention, loops=3, num_layers=2) for attention in ATTENTION_OF_EACH[:2]),
    *(case(backbone=mixed, num_layers=3) for mixed in MIXED if mixed != "none"),
    *(case(attention=attention, backbone="delta and latent", num_layers=4) for attention in ATTENTION_OF_EACH),
    # norms before and after every sublayer, and none
    case(("unet_skip", {}), num_layers=5),
    *(case((name, {}), loops=2, num_layers=2) for name in ("unet_skip", "embedding_skip", "mudd", "altup")),
    *(case(attention=(name, IDENTITY), loops=2, num_layers=2, heads=(4, 2)) for name in ("depth_attention", "moda")),
    case(attention=("moda", IDENTITY), backbone="delta and latent", num_layers=4),
    *(case(attention=(name, {}), loops=2, num_layers=3) for name in ("value_residual", "shared_kv")),
    case(("deepnorm", {}), backbone="none", num_layers=3),
    case(("deepnorm", {"form": "deeploop"}), backbone="none", loops=2, num_layers=2),
    case(("mudd", {}), ("shared_kv", {"reuse": "upper_half"}), num_layers=3),
    case(("gated_residual", {}), backbone="both", num_layers=2),
    case(("dca", {}), backbone="both", num_layers=2),
    case(("qwen4_exp", {"rank": 5}), backbone="none", num_layers=2),
]
# each two of connection, attention, backbone, heads and loops
PAIRS = covering(
    connection=range(len(CONNECTION_OF_EACH)),
    attention=range(1 + len(ATTENTION_OF_EACH)),
    # reordered norm, full-width QK-norm, tied head; LayerNorm, sinusoidal positions, biases; biases, no QK-norm
    backbone=["olmo2", "lm1b", "moda_layers", "delta and latent", "delta and attention"],
    heads=[(2, 1), (4, 2), (2, 2)],
    loops=[1, 2],
)
FURTHER_CASES = [
    *(
        case(CONNECTION_OF_EACH[c], [SELF, *ATTENTION_OF_EACH][a], backbone, loops, 4 // loops, heads)
        for c, a, backbone, heads, loops in (row.values() for row in PAIRS)
    ),
    case(attention=("moda", {"last_layer_kv": True, "attn_kv": True}), backbone="moda_layers", num_layers=2),
    case(("denseformer", {"period": 2}), loops=2, num_layers=3),
    case(("attention_residuals", {}), loops=3, num_layers=2),
    case(("attention_residuals_recency", {}), loops=3, num_layers=2),
    case(attention=("depth_attention", {"sources": "relative", "stride": 1}), loops=2, num_layers=3),
    case(attention=("depth_attention", {"stride": 2, "mixes": "key_value"}), loops=2, num_layers=3),
    case(attention=("depth_attention", {"mixing": "uniform"}), loops=2, num_layers=1),
    case(attention=("moda", {"slots": 4, "last_layer_kv": True}), loops=2, num_layers=2),
    case(("depth_qkv", {}), ("depth_attention", {"stride": 1}), backbone="olmo2", num_layers=2, heads=(4, 2)),
    *(
        case(attention=(name, settings), backbone="delta and latent", num_layers=4, heads=(2, 2))
        for name, settings in [*ATTENTION_OF_EACH, ("value_residual", {}), ("shared_kv", {"reuse": "last_k"})]
    ),
]


@pytest.mark.parametrize(
    ("connection", "attention", "backbone", "loops", "num_layers", "heads"),
    [*CASES, *(pytest.param(*further.values, marks=pytest.mark.slow, id=further.id) for further in FURTHER_CASES)],
)
def test_logits_and_every_gradient_equal_the_formulas(
    make_backbone, connection, attention, backbone, loops, num_layers, heads
):
    shape = make_backbone("qwen3" if backbone in MIXED else backbone, **MIXED.get(backbone, {}))
    size = Size(
        hidden_size=12, intermediate_size=20, num_layers=num_layers, num_heads=heads[0], num_kv_heads=heads[1],
        head_size=6, vocab_size=11,
    )  # fmt: skip
    factories = (partial(CLASSES[name], **settings) for name, settings in (connection, attention))
    model = Decoder(size, shape, *factories, loops)
    generator = torch.Generator().manual_seed(0)
    initialize(model, seed=0, std=0.3)
    model.double()
    with torch.no_grad():
        # not the initial values: gates that are initially zero would hide errors behind them
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    # more tokens than the convolution of a delta attention reaches
    length = 6 if backbone in MIXED else 3
    tokens_bt = torch.randint(size.vocab_size, (2, length), generator=generator)
    functional_tv = torch.randn(length, size.vocab_size, generator=generator, dtype=torch.float64)

    # the formulas take long, and the first sequence must have no effect on the second one
    logits_tv = model(tokens_bt)[1]
    (logits_tv * functional_tv).sum().backward()
    named = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    [expected_tv] = literal_logits(named, tokens_bt[1:], size, shape, connection, attention, loops)
    (expected_tv * functional_tv).sum().backward()

    assert deviation(logits_tv, expected_tv) < 1e-10
    off = {name: deviation(parameter.grad, named[name].grad) for name, parameter in model.named_parameters()}
    assert {name: value for name, value in off.items() if not value < 1e-10} == {}


def deviation(actual, expected):
    """Return the largest difference relative to the largest entry. A missing gradient counts as zero."""
    if actual is None or expected is None:
        given = [tensor for tensor in (actual, expected) if tensor is not None]
        return max((tensor.abs().max().item() for tensor in given), default=0.0)
    scale = expected.abs().max().clamp(min=0.1)
    return ((actual - expected).abs().max() / scale).item()
