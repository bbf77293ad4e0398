"""Connections that models ship with equal the classes of transformers, with the same weights.

The classes compute in fp32. In float64 their casts do nothing here, so the comparison is as exact as the formulas.
"""

import importlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlm.mechanisms.altup import AltUp
from depthlm.mechanisms.attention_residuals import AttentionResiduals
from depthlm.mechanisms.gated_residual import GatedResidual
from depthlm.mechanisms.layer_scale import LayerScale
from depthlm.mechanisms.mhc import ManifoldHyperConnections
from depthlm.mechanisms.qwen4_exp import Qwen4Exp
from depthlm.model.connection import Connection
from depthlm.model.shape import SublayerSpec

from ..options import option

LAYERS, STREAMS, D, EPS = 3, 4, 12, 1e-6
Run = Callable[[Tensor, list[Tensor]], list[Tensor]]


@pytest.fixture
def casts_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the classes of transformers compute in the dtype of their inputs."""
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x)


def theirs(module: str, name: str) -> Any:
    # imported here, since it takes seconds
    return getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)


CONFIG = SimpleNamespace(
    hidden_size=D, hc_mult=STREAMS, hc_count=STREAMS, hc_sinkhorn_iters=20, hc_eps=1e-6, hc_magnitude=2.0, hc_lowrank=5,
    rms_norm_eps=EPS, residual_gate_temperature=0.3, altup_num_inputs=STREAMS, altup_active_idx=0, altup_coef_clip=None,
)  # fmt: skip


def connections(make: Any, make_size: Any, make_backbone: Any) -> list[Connection]:
    """Return the connections of a decoder with LAYERS layers."""
    size, backbone = make_size(hidden_size=D, num_layers=LAYERS), make_backbone(norm_eps=EPS)
    specs = [SublayerSpec(layer, kind, LAYERS) for layer in range(LAYERS) for kind in ("attention", "mlp")]
    every = [make(spec, size, backbone) for spec in (*specs, SublayerSpec(LAYERS, "final", LAYERS))]
    for connection in every:
        connection.link(every)
    return every


def run_ours(every: list[Connection], embedding: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Return the inputs of all sublayers and the final hidden state. A sublayer sums tanh(weight * input)."""
    state, inputs = every[0].open(embedding), []
    for connection, weight in zip(every, weights, strict=False):
        read, carry = connection.read(state)
        inputs += read
        state = connection.write(state, sum((weight * x).tanh() for x in read), carry)
    return [*inputs, every[-1].close(state)]


def assert_same(ours: Run, peer: Run, parameters: list[tuple[Tensor, Tensor, Any]]):
    """Compare all inputs, and the gradients of the embedding, the sublayers and each pair of parameters.

    parameters: our parameter, theirs, and a function that rearranges the gradient of theirs.
    """
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(2, 3, D, dtype=torch.float64, generator=generator, requires_grad=True)
    weights = [torch.randn(D, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(2 * LAYERS)]
    found, expected = (run(embedding, weights) for run in (ours, peer))
    assert len(found) == len(expected)
    along = [torch.randn(y.shape, dtype=torch.float64, generator=generator) for y in found]
    for leaves, which in (([embedding, *weights], (0, 0)), ([p[:2] for p in parameters], (0, 1))):
        pairs = [leaf if isinstance(leaf, tuple) else (leaf, leaf) for leaf in leaves]
        grads = [
            torch.autograd.grad(outputs, [pair[place] for pair in pairs], along, retain_graph=True, allow_unused=True)
            for outputs, place in zip((found, expected), which, strict=True)
        ]
        orders = [parameter[2] for parameter in parameters] if which == (0, 1) else [lambda x: x] * len(pairs)
        for one, two, order in zip(*grads, orders, strict=True):
            close(one, order(two) if two is not None else torch.zeros_like(one))
    for one, two in zip(found, expected, strict=True):
        close(one, two)


def close(one: Tensor | None, two: Tensor) -> None:
    one = torch.zeros_like(two) if one is None else one
    assert (one - two).abs().max() <= 1e-10 * max(1.0, two.abs().max().item())


def randomize(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    module.double()
    for parameter in module.parameters():
        parameter.data.copy_(0.1 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return module


def transposed(n: int) -> Callable[[Tensor], Tensor]:
    """Return a function that transposes the rows of H_res among those of all maps: theirs are [old, new]."""
    order = torch.arange(n * n).view(n, n).T.flatten()
    return lambda x: torch.cat([x[: 2 * n], x[2 * n :][order]]) if len(x) > 2 * n else x


@pytest.mark.parametrize(
    ("preset", "module", "prefix"),
    [
        ("mhc_deepseek_v4", "deepseek_v4", "DeepseekV4"),
        # its maps are those of DeepSeek-V4, with a read that is one sublayer late
        ("mhc_deepseek_v41", "deepseek_v4", "DeepseekV4"),
        ("mhc_glm5", "glm5_next", "Glm5NextText"),
        ("mhc_hunyuan_v4", "hy_v4", "HYV4"),
    ],
)
def test_manifold_hyper_connections(preset, module, prefix, make_size, make_backbone, casts_do_nothing):
    settings = option("model", preset)["connection"]
    every = connections(partial(ManifoldHyperConnections, **settings), make_size, make_backbone)
    config = SimpleNamespace(**vars(CONFIG) | {"rms_norm_eps": settings.get("norm_eps", EPS)})
    maps = [randomize(theirs(module, f"{prefix}HyperConnection")(config)) for _ in range(2 * LAYERS)]
    gated = settings.get("collapse") == "gated"
    head = randomize(theirs(module, f"{prefix}HyperHead")(*[CONFIG] * (settings.get("collapse", "mean") != "mean")))
    order, pairs = transposed(STREAMS), []
    for connection, peer in zip(every, maps, strict=False):
        pairs += [(connection.phi, peer.fn, order), (connection.bias, peer.base, order)]
        pairs.append((connection.alpha, peer.scale, lambda x: x))
    if gated:
        collapse = every[-1].collapse
        pairs += [(collapse.phi, head.hc_fn, order), (collapse.bias, head.hc_base, order)]
        pairs.append((collapse.alpha, head.hc_scale, lambda x: x))
    copy_weights(pairs)

    def run_theirs(embedding: Tensor, weights: list[Tensor]) -> list[Tensor]:
        streams, inputs = embedding.unsqueeze(2).expand(-1, -1, STREAMS, -1).contiguous(), []
        pre = torch.eye(STREAMS, dtype=torch.float64)[0]
        for peer, weight in zip(maps, weights, strict=True):
            post, *comb, collapsed = peer(streams)
            if settings.get("read") == "previous":
                m = F.linear(peer.input_norm(streams.flatten(2)), peer.fn[:STREAMS])
                own = (peer.scale[0] * m + peer.base[:STREAMS]).sigmoid() + CONFIG.hc_eps
                close((own.unsqueeze(-1) * streams).sum(2), collapsed)
                collapsed, pre = (pre.unsqueeze(-1) * streams).sum(2), own
            inputs.append(collapsed)
            residual = torch.matmul(comb[0].transpose(-1, -2), streams) if comb else streams
            streams = post.unsqueeze(-1) * (weight * collapsed).tanh().unsqueeze(-2) + residual
        late = settings.get("collapse") == "last"
        return [*inputs, (pre.unsqueeze(-1) * streams).sum(2) if late else head(streams)]

    assert_same(partial(run_ours, every), run_theirs, pairs)


def copy_weights(pairs: list[tuple[Tensor, Tensor, Any]]) -> None:
    for ours, peer, order in pairs:
        ours.data = order(peer.data).clone()


def test_gated_streams(make_size, make_backbone, casts_do_nothing):
    every = connections(partial(Qwen4Exp, num_streams=STREAMS, rank=CONFIG.hc_lowrank), make_size, make_backbone)
    gates = [
        randomize(theirs("qwen4_exp", "Qwen4ExpTextGatedResidual")(CONFIG, use_combine=i < 2 * LAYERS))
        for i in range(len(every))
    ]
    pairs = []
    for connection, peer in zip(every, gates, strict=True):
        # their weight of the norm is an offset from 1
        connection.norm.data = 1 + peer.hc_norm.weight.data.view(STREAMS, D)
        weights = [
            (connection.down.weight, peer.input_mix_weight_down.weight, lambda x: x),
            (connection.up.weight, peer.input_mix_weight_up.weight, lambda x: x),
        ]
        if peer.block_inject_weight is not None:
            weights.append((connection.inject.weight, peer.block_inject_weight.weight, lambda x: x))
        copy_weights(weights)
        pairs += [*weights, (connection.norm, peer.hc_norm.weight, lambda x: x.view(STREAMS, D))]

    def run_theirs(embedding: Tensor, weights: list[Tensor]) -> list[Tensor]:
        streams, inputs = embedding.repeat(1, 1, STREAMS), []
        for peer, weight in zip(gates, weights, strict=False):
            mixed, streams, injection = peer(streams)
            inputs.append(mixed)
            streams = streams + ((weight * mixed).tanh().unsqueeze(-2) * injection.unsqueeze(-1)).flatten(-2)
        return [*inputs, gates[-1](streams)]

    assert_same(partial(run_ours, every), run_theirs, pairs)


@pytest.mark.parametrize("layers_per_block", [1, 2])
def test_attention_residuals(layers_per_block, make_size, make_backbone, casts_do_nothing):
    """The last layer has a query for each of q, k and v."""
    settings = option("model", "attention_residuals_inkling2")["connection"]
    settings |= {"block_size": 2 * layers_per_block, "separate_qkv": [LAYERS - 1]}
    every = connections(partial(AttentionResiduals, **settings), make_size, make_backbone)
    reads = [
        randomize(theirs("inkling2", "Inkling2BlockAttentionResidual")(CONFIG, connection.num_inputs))
        for connection in every
    ]
    # their layer 0 has no read before its attention
    pairs = [(ours.query, peer.query, lambda x: x) for ours, peer in list(zip(every, reads, strict=True))[1:]]
    copy_weights(pairs)

    def run_theirs(embedding: Tensor, weights: list[Tensor]) -> list[Tensor]:
        hidden, blocks, inputs = embedding, embedding.new_zeros(*embedding.shape[:-1], 0, D), []
        for layer in range(LAYERS):
            begins_block = layer % layers_per_block == 0
            attention_inputs = reads[2 * layer](blocks, hidden) if layer else (hidden,)
            inputs += attention_inputs
            output = sum((weights[2 * layer] * x).tanh() for x in attention_inputs)
            if begins_block:
                blocks = torch.cat([blocks, hidden.unsqueeze(-2)], dim=-2)
            else:
                output = hidden + output
            (mlp_input,) = reads[2 * layer + 1](blocks, output)
            inputs.append(mlp_input)
            hidden = output + (weights[2 * layer + 1] * mlp_input).tanh()
        return [*inputs, reads[-1](blocks, hidden)[0]]

    assert_same(partial(run_ours, every), run_theirs, pairs)


def test_the_gated_residual_connection(make_size, make_backbone, casts_do_nothing):
    every = connections(GatedResidual, make_size, make_backbone)
    gates = [randomize(theirs("muse_spark", "MuseSparkResidualGate")(CONFIG)) for _ in range(2 * LAYERS)]
    gates[0].gate.data[0] = 4.0  # alpha at its minimum
    pairs = [(connection.gate, peer.gate, lambda x: x) for connection, peer in zip(every, gates, strict=False)]
    copy_weights(pairs)

    def run_theirs(hidden: Tensor, weights: list[Tensor]) -> list[Tensor]:
        inputs = []
        for gate, weight in zip(gates, weights, strict=True):
            inputs.append(hidden)
            hidden = gate(hidden, (weight * hidden).tanh())
        return [*inputs, hidden]

    assert_same(partial(run_ours, every), run_theirs, pairs)


def test_residual_scaling(make_size, make_backbone, casts_do_nothing):
    every = connections(partial(LayerScale, form="affine"), make_size, make_backbone)
    scalings = [randomize(theirs("zaya", "ZayaResidualScaling")(D)) for _ in range(2 * LAYERS)]
    names = {"scale": "hidden_states_scale", "bias": "hidden_states_bias"}
    names |= {"skip_scale": "residual_scale", "skip_bias": "residual_bias"}
    pairs = [
        (getattr(ours, one), getattr(peer, two), lambda x: x)
        for ours, peer in zip(every, scalings, strict=False)
        for one, two in names.items()
    ]
    copy_weights(pairs)

    def run_theirs(hidden: Tensor, weights: list[Tensor]) -> list[Tensor]:
        inputs = []
        for scaling, weight in zip(scalings, weights, strict=True):
            inputs.append(hidden)
            hidden = scaling((weight * hidden).tanh(), hidden)
        return [*inputs, hidden]

    assert_same(partial(run_ours, every), run_theirs, pairs)


def test_alternating_updates(make_size, make_backbone, casts_do_nothing):
    """The streams are made and reduced as in Gemma3nTextModel, whose layers have more than these updates."""
    every = connections(partial(AltUp, num_streams=STREAMS), make_size, make_backbone)
    updates = [randomize(theirs("gemma3n", "Gemma3nTextAltUp")(CONFIG)) for _ in range(LAYERS)]
    ends = [[randomize(nn.Linear(D, D, bias=False)) for _ in range(STREAMS - 1)] for _ in range(2)]
    pairs = []
    for peer in updates:
        peer.router_input_scale.fill_(1 / D)  # it was made in fp32
    for attention, mlp, peer in zip(every[::2], every[1::2], updates, strict=False):
        pairs += [(attention.norm, peer.router_norm.weight), (attention.router, peer.modality_router.weight)]
        pairs += [(attention.predict, peer.prediction_coefs.weight), (mlp.correct, peer.correction_coefs.weight)]
    for connection, end in zip((every[0], every[-1]), ends, strict=True):
        pairs += [(ours.weight, peer.weight) for ours, peer in zip(connection.proj, end, strict=True)]
    pairs = [(*pair, lambda x: x) for pair in pairs]
    copy_weights(pairs)

    def projected(end: list[nn.Module], streams: list[Tensor], like: Tensor) -> list[Tensor]:
        target = torch.mean(like**2, dim=-1, keepdim=True) ** 0.5
        found = [proj(x) for proj, x in zip(end, streams, strict=True)]
        return [y * target / torch.sqrt(torch.mean(y**2, dim=-1, keepdim=True).clamp(min=1e-5)) for y in found]

    def run_theirs(embedding: Tensor, weights: list[Tensor]) -> list[Tensor]:
        streams = torch.stack([embedding, *projected(ends[0], [embedding] * (STREAMS - 1), embedding)])
        inputs = []
        for layer, peer in enumerate(updates):
            predictions = peer.predict(streams)
            active = predictions[0]
            for weight in weights[2 * layer : 2 * layer + 2]:
                inputs.append(active)
                active = active + (weight * active).tanh()
            streams = peer.correct(predictions, active)
        first, *others = streams
        return [*inputs, torch.stack([first, *projected(ends[1], others, first)]).mean(0)]

    assert_same(partial(run_ours, every), run_theirs, pairs)
