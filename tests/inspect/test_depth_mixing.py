"""The depth mixing matrix equals, in float64, products of weights that are written literally from the formulas.

Shapes: b batch, t tokens, d hidden size, n streams, j output (0: the embedding).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from depthlm.inspect import depth_mixing
from depthlm.inspect.depth_mixing import linear_read
from depthlm.mechanisms.residual import Residual
from depthlm.model import Connection, Decoder, Observer
from depthlm.model.connection import Hidden

from .conftest import TOKENS

Build = Callable[..., Decoder]
Array = np.ndarray[Any, Any]
# the embedding and the outputs of eight sublayers
OUTPUTS = 9


class Recorder(Observer):
    """Records the outputs, and each connection with the state that it reads."""

    def __init__(self) -> None:
        self.outputs: list[Array] = []
        self.reads: list[tuple[Any, Any]] = []

    def open(self, embedding_btd: Tensor) -> None:
        self.outputs.append(embedding_btd.numpy())

    def write(self, spec: Any, output_btd: Tensor) -> None:
        self.outputs.append(output_btd.numpy())

    def read(self, connection: Connection, state: Any) -> None:
        self.reads.append((connection, state))


@pytest.fixture
def record(build: Build) -> Callable[..., tuple[Decoder, Recorder]]:
    """A float64 decoder with noise on the parameters of its connections, and the record of a forward pass."""

    def make(*overrides: str) -> tuple[Decoder, Recorder]:
        model = build(*overrides).double()
        generator = torch.Generator().manual_seed(4)
        for parameter in model.connections.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        recorder = Recorder()
        model(TOKENS, observer=recorder)
        return model, recorder

    return make


def matrix(model: Decoder) -> Array:
    # the batches have different numbers of tokens
    found, warnings = depth_mixing(model, (TOKENS[:2], TOKENS[2:]))
    assert warnings == []
    return found


def same(found: Array, rows: list[Array]) -> None:
    expected = np.stack(rows)
    expected[np.triu_indices(len(rows), 1)] = np.nan
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def unit(j: int) -> Array:
    return np.eye(OUTPUTS)[j]


def softmax(scores: Array) -> Array:
    exponentials = np.exp(scores - scores.max(0))
    return exponentials / exponentials.sum(0)


@pytest.mark.parametrize("preset", ["uniform_mix", "moda"])
def test_residual_connections_have_ones_with_any_attention(record, preset):
    model, _ = record(f"model={preset}")
    same(matrix(model), [np.ones(OUTPUTS)] * OUTPUTS)


def test_denseformer_has_products_of_its_averages(record):
    model, _ = record("model=denseformer", "model.connection.period=2", "model.connection.dilation=2")
    x, y, rows = [unit(0)], unit(0), []
    for block in range(1, 5):
        rows += [y, y + unit(2 * block - 1)]
        y = rows[-1] + unit(2 * block)
        x.append(y)
        average = model.connections[2 * block - 1]
        if average.sources is not None:
            y = sum(float(a) * x[j] for a, j in zip(average.a, average.sources, strict=True))
    same(matrix(model), [*rows, y])


@pytest.mark.parametrize(
    ("block_size", "settings"),
    [(1, []), (3, ["model.connection.mixing=scalars"]), (3, ["model.connection.query=input_dependent"])],
)
def test_attention_residuals_have_their_softmax(record, block_size, settings):
    model, recorder = record("model=attention_residuals", f"model.connection.block_size={block_size}", *settings)
    rows = []
    for connection, state in recorder.reads:
        sources = state.blocks
        if hasattr(connection, "scores"):
            alpha = softmax(connection.scores.numpy())
        else:
            projected = hasattr(connection, "query_proj")
            query = sources[-1].numpy() @ connection.query_proj.weight.numpy().T if projected else connection.query
            normed = [x / np.sqrt((x**2).mean(-1, keepdims=True) + connection.eps) for x in map(np.asarray, sources)]
            scores = [(np.asarray(query) * connection.key_norm.numpy() * x).sum(-1) for x in normed]
            alpha = softmax(np.stack(scores)).mean((1, 2))
        np.testing.assert_allclose(alpha.sum(), 1)
        blocks = [0, *(1 + j // block_size for j in range(connection.spec.sublayer))]
        rows.append(np.append(alpha[blocks], np.zeros(OUTPUTS - len(blocks))))
    same(matrix(model), rows)


def test_attention_residuals_with_recency_count_an_output_in_each_snapshot(record):
    model, recorder = record("model=attention_residuals_recency", "model.connection.block_size=4")
    rows, snapshots = [], [unit(0)]
    for number, (connection, state) in enumerate(recorder.reads):
        running_sum = sum(unit(j) for j in range(number + 1))
        scores = []
        for x in map(np.asarray, state.sources):
            normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + connection.eps)
            scores.append((connection.query.numpy() * connection.key_norm.numpy() * normed).sum(-1))
        scores[-1] = scores[-1] + float(connection.recency)
        alpha = softmax(np.stack(scores)).mean((1, 2))
        if number in (4, 8):
            snapshots.append(running_sum)
        rows.append(sum(a * source for a, source in zip(alpha, [*snapshots, running_sum], strict=True)))
    same(matrix(model), rows)


@pytest.mark.parametrize(
    "settings",
    [
        ["model=dca", "model.connection.last_k=1", "model.connection.gate=printed"],
        ["model=grn_v3", "model.connection.last_k=2", "model.connection.own_embedding=false"],
        ["model=grn_v2"],
        ["model=grn_v1"],
    ],
)
def test_grn_has_the_mean_of_its_gates_over_inputs_tokens_and_channels(record, settings):
    model, recorder = record(*settings)
    rows, stack, inputs = [], [unit(0)], []
    for connection, state in recorder.reads:
        layer = connection.spec.layer
        if connection.spec.kind == "mlp":
            rows.append(inputs[0] + unit(2 * layer + 1))
            stack.append(unit(2 * layer + 1) + unit(2 * layer + 2))
            if connection.last_k is not None and len(stack) > 3:
                summed = 1 if connection.own_embedding else 0
                stack[summed : summed + 2] = [stack[summed] + stack[summed + 1]]
            continue
        inputs = []
        for i in range(connection.num_inputs):
            gates = []
            for j, g_btd in enumerate(map(np.asarray, state.blocks)):
                gate = np.broadcast_to(connection.b[i, j].numpy(), g_btd.shape)
                if connection.version == 3:
                    score = (connection.w[i, j].numpy() * g_btd).sum(-1, keepdims=True)
                    printed = connection.gate == "printed"
                    gate = gate + np.maximum(score, 0) if printed else np.maximum(gate + score, 0)
                gates.append(gate.mean())
            inputs.append(sum(gate * source for gate, source in zip(gates, stack, strict=True)))
        rows.append(np.mean(inputs, axis=0))
    same(matrix(model), rows)


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("mhc", ["model.connection.num_streams=2", "model.connection.collapse=learned"]),
        ("mhc", ["model.connection.read=previous", "model.connection.collapse=last"]),
        ("hyper_connections", []),
        ("hyper_connections", ["model.connection.dynamic=false", "model.connection.collapse=sum"]),
    ],
)
def test_hyper_connections_have_products_of_their_maps(record, preset, settings):
    model, recorder = record(f"model={preset}", *settings)
    *sublayers, (last, last_state) = recorder.reads
    reads_previous = "model.connection.read=previous" in settings
    weights = [connection.weights(state) for connection, state in sublayers]
    maps = [[np.asarray(value) for value in (own[0] if reads_previous else own)] for own in weights]
    n, kind = last.num_streams, getattr(last, "collapse", None) and last.collapse.kind
    collapse = {"mean": np.full(n, 1 / n), "sum": np.ones(n)}
    if kind == "learned":
        collapse["learned"] = softmax(last.collapse.weights.numpy())
    if reads_previous:
        # each reads with what the maps of the streams before give
        first, *later = [own_maps[0] for own_maps in maps]
        np.testing.assert_array_equal(first, np.broadcast_to(np.eye(n)[0], first.shape))
        for own, read in zip(weights, [*later, np.asarray(last_state.next_pre)], strict=True):
            np.testing.assert_array_equal(np.asarray(own[1]), read)
    rows = np.zeros((OUTPUTS, OUTPUTS))
    for b, t in np.ndindex(*TOKENS.shape):
        for row in range(OUTPUTS):
            final = collapse[kind] if kind in collapse else last_state.next_pre[b, t].numpy()
            read_n = final if row == OUTPUTS - 1 else maps[row][0][b, t]
            for j in range(row + 1):
                # where output j is written, and then mixed by the maps of all sublayers up to the row
                x_n = np.ones(n) if j == 0 else maps[j - 1][1][b, t]
                for _, _, res_btij in maps[j:row]:
                    x_n = res_btij[b, t] @ x_n
                rows[row, j] += read_n @ x_n / TOKENS.numel()
    same(matrix(model), list(rows))


@pytest.mark.parametrize("variant", ["pa", "lr", "rw"])
def test_laurel_has_the_traces_of_its_products(record, variant):
    model, _ = record("model=laurel", f"model.connection.variant={variant}")
    d, rows = model.size.hidden_size, []
    # the D x D matrix of each output in each past x
    history = [[np.eye(d)] + [np.zeros((d, d))] * (OUTPUTS - 1)]
    for number, connection in enumerate(model.connections):
        rows.append(np.array([np.trace(a) / d for a in history[-1]]))
        if number == OUTPUTS - 1:
            break
        written = [np.eye(d) * (j == number + 1) for j in range(OUTPUTS)]
        if variant == "rw":
            pairs = zip(history[-1], written, strict=True)
            history.append([float(connection.beta) * a + float(connection.alpha) * f for a, f in pairs])
            continue
        low_rank = connection.up.numpy() @ connection.down.numpy()
        gammas = connection.gamma.tolist() if variant == "pa" else [1.0]
        total = [a + f for a, f in zip(history[-1], written, strict=True)]
        for gamma, past in zip(gammas, history[::-1], strict=False):
            total = [a + gamma * low_rank @ x for a, x in zip(total, past, strict=True)]
        history.append(total)
    same(matrix(model), rows)
    # with fewer tokens than channels
    same(depth_mixing(model, [TOKENS[:1, :3]])[0], rows)


def test_rezero_has_its_weights(record):
    model, _ = record("model/connection=rezero")
    weights = [1.0, *(float(connection.alpha) for connection in model.connections[:-1])]
    same(matrix(model), [np.where(np.arange(OUTPUTS) <= row, weights, 0) for row in range(OUTPUTS)])


def test_highway_has_products_of_its_gates(record):
    model, recorder = record("model/connection=highway")
    weights, rows = np.zeros((OUTPUTS, *recorder.outputs[0].shape)), []
    weights[0] = 1
    for number, (connection, state) in enumerate(recorder.reads):
        rows.append(weights.mean((1, 2, 3)))
        if connection.spec.kind == "final":
            break
        linear = state.h.numpy() @ connection.gate.weight.numpy().T + connection.gate.bias.numpy()
        gate = 1 / (1 + np.exp(-linear))
        weights = (1 - gate) * weights
        weights[number + 1] = gate
    same(matrix(model), rows)


def test_depth_dense_has_the_traces_of_its_matrices(record):
    model, _ = record("model/connection=depth_dense")
    d, rows = model.size.hidden_size, np.zeros((OUTPUTS, OUTPUTS))
    for row, connection in enumerate(model.connections):
        parts = connection.proj.weight.numpy().reshape(d, -1, d)
        rows[row, : row + 1] = np.trace(parts, axis1=0, axis2=2) / d
    same(matrix(model), list(rows))


def test_depth_qkv_has_the_traces_of_its_weights_times_the_projections_of_values(record):
    model, _ = record("model/connection=depth_qkv")
    # with one token, the product is the same matrix everywhere
    recorder, token, size = Recorder(), TOKENS[:1, :1], model.size
    model(token, observer=recorder)
    e, group = size.hidden_size // size.num_heads, size.num_heads // size.num_kv_heads
    rows = np.zeros((OUTPUTS, OUTPUTS))
    for row, (connection, state) in enumerate(recorder.reads):
        x = [output[0, 0] for output in recorder.outputs[: row + 1]]
        np.testing.assert_allclose(state.newest[0, 0], x[-1])
        query = connection.q_proj.weight.numpy() @ x[-1]
        for head in range(size.num_heads):
            own, shared = (slice(i * e, (i + 1) * e) for i in (head, head // group))
            keys = [c.k_proj.weight.numpy()[shared] @ x_j for c, x_j in zip(model.connections, x, strict=False)]
            alpha = softmax(np.array([query[own] @ key for key in keys]) / np.sqrt(e))
            for j, weight in enumerate(alpha):
                projection = model.connections[j].v_proj.weight.numpy()[shared, own]
                rows[row, j] += weight * np.trace(projection) / size.hidden_size
    same(depth_mixing(model, [token])[0], list(rows))


def test_mrla_has_its_gates_times_its_channel_weights(record):
    model, recorder = record("model/connection=mrla")
    rows = np.zeros((OUTPUTS, OUTPUTS))
    rows[0, 0] = 1
    for row in range(1, OUTPUTS):
        outputs = recorder.outputs[: row + 1]
        query = model.connections[row].q_proj.weight.numpy() @ outputs[-1][..., None]
        for j in range(1, row + 1):
            key = model.connections[j].k_proj.weight.numpy() @ outputs[j][..., None]
            alpha = (1 / ((1 + np.exp(-query)) * (1 + np.exp(-key)))).mean()
            rows[row, j] = alpha * model.connections[j].c.numpy().mean()
    same(matrix(model), list(rows))


@pytest.mark.parametrize(
    "mechanism",
    [
        # the others have matrices above, which need it
        *(f"model={name}" for name in ("mhc_deepseek_v4", "mhc_hunyuan_v4", "qwen4_exp", "mudd")),
        "model=attention_residuals_inkling2 model.connection.separate_qkv=[1]",
        "model=mhc model.connection.read=previous model.connection.collapse=last",
        "model/connection=deepnorm backbone=lm1b",
        "model/connection=siamese_norm backbone=lm1b",
        "model/connection=deepnorm model.connection.form=keel",
        *(f"model=attention_residuals model.connection.{setting}" for setting in ("heads=4", "window=2")),
        "model/connection=ddl",
    ],
)
def test_a_read_with_given_weights_returns_what_a_read_returns(record, mechanism):
    _, recorder = record(*mechanism.split())
    for connection, state in recorder.reads[:-1]:
        # the parameters of this connection alone
        connection.link([connection])
        for found, expected in zip(linear_read(connection, state)[0], connection.read(state)[0], strict=True):
            torch.testing.assert_close(found, expected)


class Highway(Residual):
    """h <- (1 - g) h + g f(h), with a gate g that depends on h."""

    def read(self, state: Hidden, weights: Any = None) -> Any:
        return (state.h,), self.gate(state) if weights is None else weights

    def gate(self, state: Hidden) -> Tensor:
        return state.h.mean(-1, keepdim=True).sigmoid()

    def write(self, state: Hidden, output_btd: Tensor, carry: Any) -> Hidden:
        return Hidden((1 - carry) * state.h + carry * output_btd)


def test_a_matrix_with_derivatives_of_weights_is_reported(build):
    model = build("model=vanilla").double()
    for connection in model.connections:
        connection.__class__ = Highway
    _, (warning,) = depth_mixing(model, [TOKENS])
    assert "Highway defines no weights(state)" in warning
