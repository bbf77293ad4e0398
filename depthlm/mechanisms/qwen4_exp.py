"""Gated streams of Qwen4-Exp (transformers 5.23.0, `Qwen4ExpTextGatedResidual`): n streams, read through a gate.

    x_i = RMSNorm_i(X_i),  g = sigmoid(W_up silu(W_down vec(x) / n)) in R^(n D)
    h = mean_i g_i * x_i,  X_k <- X_k + 2 sigmoid(W_inject vec(x) / n)_k f(h)

The sum is over the normalized streams, and no stream is mixed with another. One more read gives the final hidden state.
X_btnd are n streams of width D, which start as copies of the embedding:

    X_btnd -+-> norm -+-> W_down, W_up -> g -> * -> mean -> sublayer f -> * W_inject x -(+)-> X_btnd
            |         `-------------------------^                                        |
            `----------------------------------------------------------------------------'

Shapes: b batch, t tokens, n streams, d hidden size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlm.mechanisms.hyper_connections import copies
from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.figures import Figure
from depthlm.model.layers import Linear
from depthlm.model.settings import at_least, check
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.dtypes import upcast
from depthlm.ops.mhc.cpu import Pending, write_streams


class State(NamedTuple):
    streams: Tensor


class Qwen4Exp(Connection):
    """Every sublayer reads a gated mean of the normalized streams, and writes to each stream with a gate of its own.

    num_streams: n.
    rank: of the gate, the width between W_down and W_up.
    """

    colour = "#B2182B"
    accumulates = "sum"

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone, num_streams: int = 4, rank: int = 320):
        super().__init__(spec, size, backbone)
        check(at_least(1, num_streams=num_streams, rank=rank))
        n, d = num_streams, size.hidden_size
        self.num_streams = n
        self.eps = backbone.norm_eps
        self.norm = nn.Parameter(torch.empty(n, d))
        self.optimizer_settings = {"norm": {"weight_decay": 0.0}}
        self.down = Linear(n * d, rank, bias=False)
        self.up = Linear(rank, n * d, bias=False)
        # the norm reads and writes X, which the projection reads; the gate written and read; X read for the sum, and
        # the input written
        self.cost = Cost(2.0 * d * n, float(d * (6 * n + 1)))
        if spec.kind != "final":
            self.inject = Linear(n * d, n, bias=False)
            # X read by this projection too; X read and written with the output; less the 3 of a residual connection
            self.cost = Cost(2.0 * d * 2 * n, float(d * (9 * n + 2 - 3)))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.fill_(1.0)

    def open(self, embedding_btd: Tensor) -> State:
        return State(copies(embedding_btd, self.num_streams))

    def read(self, state: State, weights: tuple[Tensor, Tensor | None] | None = None) -> tuple[Inputs, Tensor | None]:
        read_btnd, write_btn = self.weights(state) if weights is None else weights
        return ((read_btnd * state.streams).sum(2).to(state.streams.dtype),), write_btn

    def weights(self, state: State) -> tuple[Tensor, Tensor | None]:
        """Return the factors of the streams in a read, with the norm in them, and those of the output in a write."""
        g_btnd, scale_btnd, write_btn = self.gates(state)
        return g_btnd * scale_btnd / self.num_streams, write_btn

    def gates(self, state: State) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return g_btnd, what the norm multiplies the streams by, and the gates of the write."""
        x_btnd = upcast(state.streams)
        scale_btnd = (x_btnd.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.norm
        normed = (x_btnd * scale_btnd).to(state.streams.dtype).flatten(2)
        g = upcast(self.up(F.silu(self.down(normed) / self.num_streams))).sigmoid()
        write_btn = 2 * upcast(self.inject(normed) / self.num_streams).sigmoid() if self.spec.kind != "final" else None
        return g.unflatten(-1, scale_btnd.shape[2:]), scale_btnd, write_btn

    def write(self, state: State, output_btd: Tensor, carry: Tensor) -> State:
        return State(write_streams(state.streams, Pending(output_btd, carry, None)))

    def figures(self, state: State) -> list[Figure]:
        (g_btnd, _, write_btn), stream = self.gates(state), ("stream", "batch", "token")
        figures = [Figure("gate", g_btnd.movedim(2, 0), (*stream, "hidden"), "the gate of each stream in a read")]
        if write_btn is not None:
            figures.append(Figure("write", write_btn.movedim(-1, 0), stream, "where an output goes", after=True))
        return figures
