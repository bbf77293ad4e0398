"""The depth mixing matrix equals, in float64, the derivatives of the formulas whose weights are constants.

Shapes: b batch, t tokens, d hidden size.
"""

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

from ..model.literal import connections, streams
from ..model.literal.parts import Model, weighted_sum
from .conftest import TOKENS, noisy_decoder

# of windows of different lengths
WINDOWS = torch.tensor([[3, 8]]), torch.tensor([[11]])


class Recorder(Observer):
    """Records the outputs, and each connection with the state that it reads."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.reads: list[tuple[Connection, Any]] = []

    def open(self, embedding_btd: Tensor) -> None:
        self.outputs.append(embedding_btd)

    def write(self, spec: Any, output_btd: Tensor) -> None:
        self.outputs.append(output_btd)

    def read(self, connection: Connection, state: Any) -> None:
        self.reads.append((connection, state))


def recorded(model: Decoder, tokens_bt: Tensor) -> Recorder:
    recorder = Recorder()
    model.hidden(tokens_bt, observer=recorder)
    return recorder


def of_formulas(model: Decoder, name: str, settings: dict[str, Any], tokens_bt: Tensor) -> np.ndarray[Any, Any]:
    """Return M[t, l, j] of one window: the mean of the diagonal of d input_l / d output_j, and of q, k and v."""
    parts = Model(dict(model.state_dict()), model.size, model.backbone, loops=1)
    outputs = [output[0] for output in recorded(model, tokens_bt).outputs]
    found = np.full((len(outputs[0]), len(outputs), len(outputs)), np.nan)
    for t, row in np.ndindex(found.shape[:2]):

        def mean_input(*x: Tensor, row: int = row) -> Tensor:
            return torch.stack(connections.CONNECTIONS[name](parts, row, x[0], list(x[1:]), **settings)).mean(0)

        earlier = tuple(output[t] for output in outputs[: row + 1])
        for j, matrix in enumerate(torch.autograd.functional.jacobian(mean_input, earlier, vectorize=True)):
            found[t, row, j] = matrix.diagonal().mean()
    return found


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("residual", {}),
        ("denseformer", {"period": 2, "dilation": 2}),
        ("attention_residuals", {"block_size": 1}),
        ("attention_residuals", {"block_size": 3, "mixing": "scalars"}),
        ("attention_residuals", {"block_size": 3, "query": "input_dependent"}),
        ("attention_residuals", {"block_size": 3, "separate_qkv": [1]}),
        ("attention_residuals", {"block_size": 1, "window": 2, "heads": 4}),
        ("attention_residuals", {"block_size": 3, "routing": "additive"}),
        ("attention_residuals_recency", {"block_size": 2}),
        ("dca", {"last_k": 1, "gate": "printed"}),
        ("dca", {"last_k": 2, "own_embedding": False, "separate_qkv": False}),
        ("dca", {"version": 2}),
        ("dca", {"version": 1, "separate_qkv": False}),
        ("hyper_connections", {}),
        ("hyper_connections", {"dynamic": False, "collapse": "sum"}),
        ("mhc", {"num_streams": 2, "collapse": "learned"}),
        ("mhc", {"residual": "identity", "collapse": "gated"}),
        ("mhc", {"num_streams": 3, "read": "previous", "collapse": "last"}),
        ("laurel", {}),
        ("laurel", {"variant": "lr"}),
        ("laurel", {"variant": "rw"}),
        ("rezero", {}),
        ("highway", {}),
        ("depth_dense", {}),
        ("depth_qkv", {}),
        ("mrla", {}),
        ("mudd", {}),
        ("mudd", {"layers": 2, "sources": 2}),
        ("embedding_skip", {}),
        ("unet_skip", {}),
        ("backout", {}),
        ("wide_residual", {}),
        ("layer_scale", {}),
        ("gated_residual", {}),
        ("gated_residual", {"form": "token"}),
    ],
    ids=str,
)
def test_the_matrix_of_a_connection_is_that_of_its_formula(name, settings, monkeypatch):
    def with_constants(weights: list[Tensor], sources: list[Tensor]) -> Tensor:
        return weighted_sum([weight.detach() for weight in weights], sources)

    for module in (connections, streams):
        monkeypatch.setattr(module, "weighted_sum", with_constants)
    model = noisy_decoder((name, settings), layers=3)
    # the matrices of depth_qkv are neither diagonal nor the same for all tokens, so only a single token is exact
    windows = WINDOWS[1:] if name == "depth_qkv" else WINDOWS
    found, warnings = depth_mixing(model, windows)
    assert warnings == []
    of_tokens = np.concatenate([of_formulas(model, name, settings, tokens_bt) for tokens_bt in windows])
    np.testing.assert_allclose(found, of_tokens.mean(0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen4_exp", {}),
        ("attention_residuals", {"key_norm": "plain", "values": "normed", "scale": True, "separate_qkv": [1]}),
        ("deepnorm", {}),
        ("deepnorm", {"form": "keel"}),
        ("siamese_norm", {}),
        ("ddl", {}),
    ],
    ids=str,
)
def test_a_read_with_given_weights_returns_what_a_read_returns(name, settings):
    model = noisy_decoder((name, settings), layers=3)
    for connection, state in recorded(model, WINDOWS[0]).reads[:-1]:
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
