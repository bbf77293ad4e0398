"""Hyper-connections (arXiv 2409.19606): n residual streams with learned maps between them.

    X <- H_res X + H_post^T f(H_pre X),  H = static + s * tanh(RMSNorm(X) W)

for each of H_pre, H_post and H_res, with columns of W in R^D of its own; H_pre and H_res share one s. The norm is that
of each stream, without a weight. X_btnd are n streams of width D, which start as copies of the embedding:

    X_btnd --+-> H_pre X -> sublayer f -> H_post^T -(+)-> X_btnd
             `-> H_res X ----------------------------'

Shapes: b batch, t tokens, n streams (i new, j old), d hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.figures import Figure
from depthlm.model.settings import at_least, boolean, check, one_of
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.hyper_connections.cpu import Dynamic, Static, hyper_maps
from depthlm.ops.hyper_connections.naive import hyper_post_pre
from depthlm.ops.mhc.cpu import Maps, Pending, read_streams, write_streams

COLLAPSES = ("mean", "sum", "learned")


class State(NamedTuple):
    """streams: X_btnd before the pending write. A write is deferred: one operator performs it and the next read."""

    streams: Tensor
    pending: Pending | None = None

    def written(self) -> Tensor:
        """Return X_btnd, with the pending write applied."""
        return self.streams if self.pending is None else write_streams(self.streams, self.pending)


class Carry(NamedTuple):
    """What the deferred write needs: X_btnd of the read, and its maps."""

    streams: Tensor
    post_btn: Tensor
    res_btij: Tensor


class HyperConnections(Connection):
    """Hyper-connections. They initially equal vanilla: each sublayer reads one stream and writes to all, and W is zero.

    num_streams: n.
    dynamic: whether the maps have a dynamic part. Without one, PyTorch runs for any choice of kernels.
    collapse: how the streams become the final hidden state: mean, sum, or learned, a learned softmax average.
    """

    colour = "#882255"

    def __init__(
        self,
        spec: SublayerSpec,
        size: Size,
        backbone: Backbone,
        num_streams: int = 4,
        dynamic: bool = True,
        collapse: str = "mean",
    ):
        super().__init__(spec, size, backbone)
        check(at_least(1, num_streams=num_streams), boolean(dynamic=dynamic), one_of(COLLAPSES, collapse=collapse))
        self.num_streams = num_streams
        self.dynamic = dynamic
        self.eps = backbone.norm_eps
        n, d = num_streams, size.hidden_size
        if spec.kind == "final":
            self.collapse = Collapse(n, collapse)
            return
        self.static_pre = nn.Parameter(torch.empty(n))
        self.static_post = nn.Parameter(torch.empty(n))
        self.static_res = nn.Parameter(torch.empty(n, n))
        self.optimizer_settings = {name: {"weight_decay": 0.0} for name in ("static_pre", "static_post", "static_res")}
        if dynamic:
            self.w = nn.Parameter(torch.empty(n + 2, d))
            self.scale = nn.Parameter(torch.empty(2))
        self.fp32_parameters = tuple(self._parameters)
        self.cost = stream_cost(n, d, maps_flops=2.0 * n * d * (n + 2) if dynamic else 0.0)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        if name == "static_pre":
            tensor[self.spec.sublayer % self.num_streams] = 1.0
        elif name == "static_res":
            tensor.fill_diagonal_(1.0)
        else:
            tensor.fill_({"static_post": 1.0, "w": 0.0, "scale": 0.01}[name])

    def open(self, embedding_btd: Tensor) -> State:
        return State(copies(embedding_btd, self.num_streams))

    def read(self, state: State, weights: Maps | None = None) -> tuple[Inputs, Carry]:
        if weights is not None:
            return read_with(weights, state)
        input_btd, *carry = hyper_post_pre(
            state.streams, state.pending, *self.parts(), self.eps, rebuilds(self, state.streams)
        )
        return (input_btd,), Carry(*carry)

    def weights(self, state: State) -> Maps | None:
        return None if self.spec.kind == "final" else hyper_maps(state.written(), *self.parts(), self.eps)

    def parts(self) -> tuple[Static, Dynamic | None]:
        """Return the parameters of the static maps and of the dynamic ones."""
        static = self.static_pre, self.static_post, self.static_res
        return static, (self.w, self.scale) if self.dynamic else None

    def write(self, state: State, output_btd: Tensor, carry: Carry) -> State:
        return State(carry.streams, Pending(output_btd, carry.post_btn, carry.res_btij))

    def close(self, state: State) -> Tensor:
        return self.collapse(state.written())

    def figures(self, state: State) -> list[Figure]:
        return map_figures(self.weights(state))


class Collapse(nn.Module):
    """Reduces the streams to one hidden state: x_btnd -> x_btd."""

    def __init__(self, num_streams: int, kind: str):
        super().__init__()
        self.kind = kind
        if kind == "learned":
            self.weights = nn.Parameter(torch.empty(num_streams))
            self.fp32_parameters = ("weights",)

    def forward(self, x_btnd: Tensor) -> Tensor:
        if self.kind == "learned":
            b, t, n, _ = x_btnd.shape
            return read_streams(self.weights.softmax(0).expand(b, t, n), x_btnd)
        return x_btnd.sum(2) if self.kind == "sum" else x_btnd.mean(2)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.zero_()


def read_with(maps: Maps, state: State) -> tuple[Inputs, Carry]:
    """Return the input H_pre X of given maps, and the carry."""
    streams = state.written()
    return (read_streams(maps.pre_btn, streams),), Carry(streams, maps.post_btn, maps.res_btij)


def copies(embedding_btd: Tensor, num_streams: int) -> Tensor:
    """Return X_btnd before the first sublayer."""
    return embedding_btd[:, :, None].expand(-1, -1, num_streams, -1)


def rebuilds(connection: Connection, streams_btnd: Tensor) -> bool:
    """Return whether the backward pass computes streams again (`depthlm.ops.mhc.rebuilding`).

    On a GPU memory is worth the time. With activation checkpointing, the streams within a layer are computed again in
    any case.
    """
    return connection.is_linked and streams_btnd.is_cuda


def stream_cost(n: int, d: int, maps_flops: float) -> Cost:
    """Return the cost of H_pre X, H_res X and H_post^T y, and of the maps, without Sinkhorn-Knopp.

    Values, if each of them runs alone: the maps read X (n D); H_pre X reads X and writes the input (n + 1); H_res X
    reads and writes n streams (2 n); the write of y reads it and n streams, and writes n streams (2 n + 1). These
    are 6 n + 2, less the 3 of a residual connection. With n = 4 this gives the total of Depth-Attention (appendix
    B.5), which has no breakdown.
    """
    return Cost(2.0 * d * (2 * n + n * n) + maps_flops, float(d * (6 * n + 2 - 3)))


def map_figures(maps: Maps | None) -> list[Figure]:
    """Return the figures of the maps."""
    if maps is None:
        return []
    stream = ("stream", "batch", "token")
    return [
        Figure("res", maps.res_btij.permute(2, 3, 0, 1), ("stream", *stream), "mixing maps H_res"),
        Figure("pre", maps.pre_btn.movedim(-1, 0), stream, "H_pre: what a sublayer reads"),
        Figure("post", maps.post_btn.movedim(-1, 0), stream, "H_post: where the output of a sublayer goes", after=True),
    ]
