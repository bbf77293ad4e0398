"""Interventions: a loss without an edge equals, in float64, that of the slow decoder of the formulas without it."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from depthlm.inspect.interventions import WITH_EDGES, Batch, Edge, Intervention, losses, prefixes, record
from depthlm.model import Connection
from depthlm.model.edges import Reader

from ..model.literal import attentions, connections
from ..model.literal.classes import CLASSES, mechanisms
from ..model.literal.decoder import Mechanism, literal_logits
from .conftest import noisy_decoder

TOKENS = torch.randint(17, (2, 5), generator=torch.Generator().manual_seed(0))
BATCH = TOKENS[:, :-1], TOKENS[:, 1:]
Parameters = dict[str, Tensor]
PLAIN, SELF = ("residual", {}), ("self_attention", {})
# mechanisms whose weights of one read sum to 1, with settings; the others below
SOFTMAX = [
    ("attention_residuals", {"block_size": 1}),
    ("attention_residuals", {"block_size": 3, "values": "normed", "separate_qkv": [1]}),
    ("attention_residuals_recency", {"block_size": 2}),
    ("depth_qkv", {}),
]


class Case:
    """A decoder in float64 with noise on all parameters, and the decoder of the formulas with the same parameters."""

    def __init__(self, connection: Mechanism = PLAIN, attention: Mechanism = SELF, layers: int = 2) -> None:
        self.connection, self.attention = connection, attention
        self.model = noisy_decoder(connection, attention, layers)
        self.size, self.backbone = self.model.size, self.model.backbone
        self.parameters = dict(self.model.state_dict())
        self.reads, self.baseline = record(self.model, [BATCH])

    def literal(self, changed: Parameters | None = None, connection: Mechanism | None = None) -> float:
        """The loss of the formulas, with other parameters or another connection."""
        parameters = self.parameters | (changed or {})
        logits = literal_logits(
            parameters, BATCH[0], self.size, self.backbone, connection or self.connection, self.attention
        )
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), BATCH[1].flatten(), reduction="sum"))

    def edge(self, name: str, source: int, panel: int = 0) -> Edge:
        """The edge of a reader with a source."""
        found = [edge for edge in self.reads.all_edges() if edge.reader.name == name and edge.panel == panel]
        return next(edge for edge in found if self.reads.source(edge) == source)

    def without(self, *edges: Edge, renormalize: bool = True) -> float:
        """The loss without edges, by the decoder itself."""
        return float(losses(self.model, BATCH, Intervention(self.reads, [edges], "zero", renormalize))[0])

    def same(self, found: float, expected: float, changes: bool = True) -> None:
        assert found == pytest.approx(expected, rel=1e-11)
        assert (abs(found - self.baseline[0]) > 1e-4) == changes


def sublayer(reader: Reader) -> int:
    return 2 * reader.layer + (reader.kind == "mlp")


@contextmanager
def literal_softmax_without(name: str, target: int, places: dict[int, int]) -> Iterator[None]:
    """Let the formulas of one sublayer take the softmax over all sources but one. places: it, for each input."""
    original, softmax = connections.CONNECTIONS[name], connections.softmax

    def literal(m: Any, s: int, x_0: Tensor, f: list[Tensor], **settings: Any) -> list[Tensor]:
        calls = iter(range(100))

        def without(scores: list[Tensor]) -> list[Tensor]:
            # depth_qkv has one softmax per head, and all lack the source
            place = places.get(next(calls), places.get(-1))
            if s != target or place is None:
                return softmax(scores)
            if len(scores) == 1:
                return [torch.zeros_like(scores[0])]
            alpha = softmax([*scores[:place], *scores[place + 1 :]])
            return [*alpha[:place], torch.zeros_like(scores[0]), *alpha[place:]]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connections, "softmax", without)
            return original(m, s, x_0, f, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(connections.CONNECTIONS, name, literal)
        yield


@pytest.mark.parametrize("connection", SOFTMAX, ids=str)
def test_without_any_edge_the_softmax_is_over_the_other_sources(connection):
    case = Case(connection)
    edges = case.reads.all_edges()
    # all in one pass, each in a copy of its own, from the embedding on
    found = losses(case.model, BATCH, Intervention(case.reads, [[edge] for edge in edges], "zero"), len(edges))
    assert case.baseline[0] == pytest.approx(case.literal(), rel=1e-12)
    for edge, loss in zip(edges, found, strict=True):
        inputs = {-1: edge.place} if connection[0] == "depth_qkv" else {edge.panel: edge.place}
        with literal_softmax_without(connection[0], sublayer(edge.reader), inputs):
            # the first read has the embedding twice, also as the running sum
            twice = connection[0] == "attention_residuals_recency" and edge.reader == Reader("attention", 0)
            case.same(float(loss), case.literal(), changes=not twice)


def with_zero(case: Case, name: str, *index: int) -> Parameters:
    parameter = case.parameters[name].clone()
    parameter[index] = 0
    return {name: parameter}


def test_without_an_edge_of_parameters_it_is_the_formula_with_zero():
    case = Case(("denseformer", {"dilation": 2}), layers=3)
    case.same(case.without(case.edge("mlp_2", 3)), case.literal(with_zero(case, "connections.5.a", 1)))
    case = Case(("embedding_skip", {}))
    case.same(case.without(case.edge("attention_1", 0)), case.literal(with_zero(case, "connections.2.weight", 1)))
    case = Case(("unet_skip", {}))
    case.same(case.without(case.edge("attention_1", 1)), case.literal(with_zero(case, "connections.2.c", 0)))
    case = Case(("laurel", {"last_k": 2}))
    case.same(case.without(case.edge("mlp_1", 2)), case.literal(with_zero(case, "connections.3.gamma", 1)))
    case = Case(attention=("value_residual", {}))
    zero = with_zero(case, "layers.1.attention.value_weights", 1)
    case.same(case.without(case.edge("layer_1", 0)), case.literal(zero))


def test_without_an_edge_of_dca_and_mudd():
    for settings in ({"version": 1}, {"version": 2, "separate_qkv": False}):
        case = Case(("dca", settings))
        panel = 0 if "separate_qkv" in settings else 2
        zero = with_zero(case, "connections.2.b", panel, 1)
        case.same(case.without(case.edge("attention_1", 1, panel)), case.literal(zero))
    case = Case(("dca", {"last_k": 1}), layers=3)
    # relu(b + w . G) of the newest of embedding, sum of older blocks, and last block
    gate = case.parameters["connections.4.b"].clone()
    gate[1, 2] = -1e6
    case.same(case.without(case.edge("attention_2", 2, 1)), case.literal({"connections.4.b": gate}))
    case = Case(("mudd", {}))
    row = 2 * 2 + 1
    zero = with_zero(case, "connections.2.a", 2, 1) | with_zero(case, "connections.2.w_2.weight", row)
    case.same(case.without(case.edge("attention_1", 1, 2)), case.literal(zero))


def test_without_sums_that_are_not_renormalized():
    case = Case(("attention_residuals", {"block_size": 1, "mixing": "sigmoid"}))
    original, weighted_sum = connections.CONNECTIONS["attention_residuals"], connections.weighted_sum

    def literal(m: Any, s: int, *arguments: Any, **settings: Any) -> list[Tensor]:
        def without(weights: list[Tensor], sources: list[Tensor]) -> Tensor:
            return weighted_sum(weights, sources) - (weights[1] * sources[1] if s == 3 else 0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connections, "weighted_sum", without)
            return original(m, s, *arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(connections.CONNECTIONS, "attention_residuals", literal)
        case.same(case.without(case.edge("mlp_1", 1)), case.literal())
        # a softmax, but the other weights remain as they are
        case = Case(("attention_residuals", {"block_size": 1}))
        case.same(case.without(case.edge("mlp_1", 1), renormalize=False), case.literal())


@pytest.mark.parametrize("settings", [{}, {"mixing": "uniform", "mixes": "key_value"}], ids=str)
def test_depth_attention_without_its_source_is_vanilla(settings):
    case = Case(attention=("depth_attention", settings))
    found = case.without(case.edge("layer_1", 0))
    case.attention = SELF
    case.same(found, case.literal())


@pytest.mark.parametrize("settings", [{}, {"slots": 2, "attn_kv": True}], ids=str)
def test_moda_without_an_entry_of_depth(settings):
    case = Case(attention=("moda", settings), layers=3)
    numbers = [case.reads.source(edge) for edge in case.reads.all_edges() if edge.reader.layer == 2]
    assert numbers == ([2, 3] if settings else [0, 1, 2, 3])
    found, causal = case.without(case.edge("layer_2", 3)), attentions.causal

    def without(m: Any, q: Any, k: Any, v: Any, extra: Callable) -> Any:
        last = len(extra(0, 0)) == len(numbers) and extra(0, 0)
        return causal(m, q, k, v, (lambda t, g: extra(t, g)[:-1]) if last and layers[-1] == 2 else extra)

    original, layers = attentions.ATTENTIONS["moda"], []

    def literal(m: Any, now: Any, before: Any, **options: Any) -> Any:
        layers.append(now.place)
        return original(m, now, before, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attentions, "causal", without)
        patch.setitem(attentions.ATTENTIONS, "moda", literal)
        case.same(found, case.literal())


def test_the_residual_map_of_streams_as_the_identity():
    case = Case(("hyper_connections", {"num_streams": 2}))
    parameters = {name: case.parameters[f"connections.1.{name}"].clone() for name in ("static_res", "w")}
    parameters["static_res"][:] = torch.eye(2)
    # of pre, post and each old stream: the columns of W
    parameters["w"][2:] = 0
    changed = {f"connections.1.{name}": parameter for name, parameter in parameters.items()}
    case.same(case.without(case.edge("mlp_0", 0)), case.literal(changed))
    for read in ("own", "previous"):
        case = Case(("mhc", {"num_streams": 2, "iterations": 3, "read": read}))
        rows = {"phi": 4, "bias": 4, "alpha": 2}
        changed = {
            f"connections.{s}.{name}": case.parameters[f"connections.{s}.{name}"][:count]
            for s in range(4)
            for name, count in rows.items()
        }
        identity = "mhc", {"num_streams": 2, "residual": "identity", "read": read}
        case.same(case.without(*case.reads.all_edges()), case.literal(changed, identity))


@pytest.mark.parametrize("mechanism", [*mechanisms()], ids=lambda mechanism: mechanism.__name__)
def test_every_mechanism_with_weights_of_sources_passes_them_through_edited(mechanism):
    part = "connection" if issubclass(mechanism, Connection) else "attention"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CLASSES, "tried", mechanism)
        case = Case(**{part: ("tried", {})})
    assert case.baseline[0] == pytest.approx(float(case.model(*BATCH).nll), rel=1e-12)
    edges = case.reads.edges.values()
    named = mechanism.__module__.rpartition(".")[2] in re.findall(r"\w+", WITH_EDGES)
    assert bool(edges) == named


ALL = [
    (("attention_residuals", {"block_size": 3, "values": "normed", "separate_qkv": [1]}), SELF),
    (("depth_qkv", {}), ("depth_attention", {"stride": 1})),
    (("dca", {}), SELF),
    (("mudd", {}), ("value_residual", {"weights": "fixed"})),
    (("laurel", {}), ("moda", {"slots": 3})),
    (("hyper_connections", {"num_streams": 2}), SELF),
    (("mhc", {"num_streams": 2}), ("depth_attention", {"mixing": "uniform"})),
]


@pytest.mark.parametrize(("connection", "attention"), ALL, ids=str)
def test_a_pass_from_the_middle_with_copies_equals_separate_passes(connection, attention):
    case = Case(connection, attention, layers=3)
    case.model.end_of_text = 3
    reads, baseline = record(case.model, [BATCH])
    starts = prefixes(case.model, BATCH, reads)
    for layer in range(4):
        edges = [edge for edge in reads.all_edges() if edge.reader.layer == layer]
        for how in ("zero", "mean"):
            apart = [losses(case.model, BATCH, Intervention(reads, [[edge]], how))[0] for edge in edges]
            together = Intervention(reads, [[edge] for edge in edges], how)
            found = losses(case.model, BATCH, together, len(edges), starts[layer]) if edges else []
            np.testing.assert_allclose(found, apart, rtol=1e-12)
    assert losses(case.model, BATCH, reads, after=starts[2])[0] == pytest.approx(baseline[0], rel=1e-12)
    # the decoder itself is as it was
    assert case.model.connections[0].edit is None
    assert float(case.model(*BATCH).nll) == pytest.approx(baseline[0], rel=1e-12)


def test_means_over_tokens():
    case = Case(("attention_residuals", {"block_size": 1}))
    other: Batch = tuple(x[:1, :3] for x in BATCH)  # type: ignore[assignment]
    reads, _ = record(case.model, [BATCH, other])
    edge, recorded = case.edge("mlp_1", 2), []
    assert edge.place == 2

    def edit(reader: Reader, weights: Tensor, edges: Any) -> Tensor:
        if reader != edge.reader:
            return weights
        recorded.append(weights[0, 2])
        weights = weights.clone()
        weights[0, 2] = next(values)
        return weights

    values = iter([torch.zeros(2, 4), torch.zeros(1, 3)])
    for batch in (BATCH, other):
        losses(case.model, batch, edit)
    mean = torch.cat([x.flatten() for x in recorded]).mean()
    assert reads.weights_pn(edge.reader)[0, 2] == pytest.approx(float(mean), rel=1e-12)
    values = iter([mean.expand(2, 4)])
    expected = losses(case.model, BATCH, edit)[0]
    assert losses(case.model, BATCH, Intervention(reads, [[edge]], "mean"))[0] == pytest.approx(expected, rel=1e-12)
    assert abs(expected - case.baseline[0]) > 1e-4
