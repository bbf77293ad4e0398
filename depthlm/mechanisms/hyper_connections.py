"""Hyper-connections (arXiv 2409.19606): n residual streams with learned maps between them.

    X <- H_res X + H_post^T f(H_pre X),  H = static + s * tanh(RMSNorm(X) W)

for each of H_pre, H_post and H_res, with columns of W in R^D of its own; H_pre and H_res share one s. The norm is that
of each stream, without a weight. X_btnd are n streams of width D, which start as copies of the embedding:

    X_btnd --+-> H_pre X -> sublayer f -> H_post^T -(+)-> X_btnd
             `-> H_res X ----------------------------'

Shapes: b batch, t tokens, n streams (i new, j old), d hidden size.
"""

from typing import Any, ClassVar, NamedTuple

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
    """streams: X_btnd before the pending write. A write is deferred: one operator performs it and the next read.

    next_pre: the H_pre with which the next sublayer reads, if it is not its own.
    """

    streams: Tensor
    pending: Pending | None = None
    next_pre: Tensor | None = None

    def written(self) -> Tensor:
        """Return X_btnd, with the pending write applied."""
        return self.streams if self.pending is None else write_streams(self.streams, self.pending)

    def settled(self) -> "State":
        """Return the state after the pending write."""
        return State(self.written(), next_pre=self.next_pre)


class Carry(NamedTuple):
    """What the deferred write needs: X_btnd of the read, and its maps. next_pre: as in the state."""

    streams: Tensor
    post_btn: Tensor
    res_btij: Tensor | None
    next_pre: Tensor | None = None


class HyperConnections(Connection):
    """Hyper-connections. They initially equal vanilla: each sublayer reads one stream and writes to all, and W is zero.

    num_streams: n.
    dynamic: whether the maps have a dynamic part. Without one, PyTorch runs for any choice of kernels.
    collapse: how the streams become the final hidden state: mean, sum, or learned, a learned softmax average.
    """

    colour = "#882255"
    identity_start: str | None = ""
    accumulates = "sum"
    depth_exponents: ClassVar = {"static_res": 1.0, "w": 1.0, "scale": 1.0}
    width_exponents: ClassVar = {"w": 1.0}

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
        if collapse == "sum":
            # n equal streams
            self.identity_start = None
        if spec.kind == "final":
            self.collapse = Collapse(n, collapse)
            self.cost = collapse_cost(n, d, collapse)
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
        if weights is None and self.edit is not None:
            weights = self.weights(state)
        if weights is not None:
            return read_with(weights, state)
        input_btd, streams_btnd, post_btn, res_btij = hyper_post_pre(
            state.streams, state.pending, *self.parts(), self.eps, rebuilds(self, state.streams)
        )
        return (input_btd,), Carry(streams_btnd, post_btn, res_btij)

    def weights(self, state: State) -> Maps | None:
        if self.spec.kind == "final":
            return None
        return edited_maps(self, hyper_maps(state.written(), *self.parts(), self.eps))

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

    def diagnostics(self, state: State, memory: dict[str, Any]) -> dict[str, Tensor]:
        if self.spec.kind == "final":
            return final_diagnostics("hyper_connections", self.collapse.stream_weights(state.written()), memory)
        return stream_diagnostics("hyper_connections", hyper_maps(state.written(), *self.parts(), self.eps), memory)


class Collapse(nn.Module):
    """Reduces the streams to one hidden state: x_btnd -> x_btd."""

    def __init__(self, num_streams: int, kind: str):
        super().__init__()
        self.kind = kind
        if kind == "learned":
            self.weights = nn.Parameter(torch.empty(num_streams))
            self.fp32_parameters = ("weights",)

    def forward(self, x_btnd: Tensor, weights: None = None) -> Tensor:
        if self.kind == "learned":
            return read_streams(self.stream_weights(x_btnd), x_btnd)
        return x_btnd.sum(2) if self.kind == "sum" else x_btnd.mean(2)

    def stream_weights(self, x_btnd: Tensor) -> Tensor:
        """Return the weight of each stream, w_btn."""
        b, t, n, _ = x_btnd.shape
        if self.kind == "learned":
            return self.weights.softmax(0).expand(b, t, n)
        return x_btnd.new_full((b, t, n), 1.0 if self.kind == "sum" else 1 / n)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.zero_()


def read_with(maps: Maps, state: State) -> tuple[Inputs, Carry]:
    """Return the input H_pre X of given maps, and the carry."""
    streams = state.written()
    return (read_streams(maps.pre_btn, streams),), Carry(streams, maps.post_btn, maps.res_btij)


def edited_maps(connection: Connection, maps: Maps) -> Maps:
    """Return the maps with the H_res that the edit of the connection makes of theirs."""
    if connection.edit is None or maps.res_btij is None:
        return maps
    return maps._replace(res_btij=connection.edited(maps.res_btij, ("batch", "token", "stream", "stream")))


def copies(embedding_btd: Tensor, num_streams: int) -> Tensor:
    """Return X_btnd before the first sublayer."""
    return embedding_btd[:, :, None].expand(-1, -1, num_streams, -1)


def rebuilds(connection: Connection, streams_btnd: Tensor) -> bool:
    """Return whether the backward pass computes streams again (`depthlm.ops.mhc.rebuilding`).

    On a GPU memory is worth the time. With activation checkpointing, the streams within a layer are computed again in
    any case.
    """
    return connection.is_linked and streams_btnd.is_cuda


def collapse_cost(n: int, d: int, kind: str) -> Cost:
    """Return the cost of a `Collapse`: of a weighted sum, which reads and writes as many values as a mean."""
    return Cost(2.0 * n * d) if kind in ("learned", "last") else Cost()


def stream_cost(n: int, d: int, maps_flops: float, mixes: bool = True) -> Cost:
    """Return the cost of H_pre X, H_res X and H_post^T y, and of the maps, without Sinkhorn-Knopp.

    Values, if each of them runs alone: the maps read X (n D); H_pre X reads X and writes the input (n + 1); H_res X
    reads and writes n streams (2 n); the write of y reads it and n streams, and writes n streams (2 n + 1). These
    are 6 n + 2, less the 3 of a residual connection. With n = 4 this gives the total of Depth-Attention (appendix
    B.5), which has no breakdown. mixes: whether H_res is not the identity.

    In Table 1 of Attention Residuals (arXiv 2603.15031), H_post^T y is written first (n D), and its sum with H_res X
    reads both; maps are written and read: 8 n D + 2 D + 2 n^2 + 4 n.
    """
    flops = 2.0 * d * (2 * n + (n * n if mixes else 0)) + maps_flops
    in_table_1 = float(d * ((8 if mixes else 6) * n + 2) + 4 * n + (2 * n * n if mixes else 0))
    return Cost(flops, float(d * ((6 if mixes else 4) * n + 2 - 3)), in_table_1)


def map_figures(maps: Maps | None) -> list[Figure]:
    """Return the figures of the maps."""
    if maps is None:
        return []
    stream = ("stream", "batch", "token")
    figures = [
        Figure("pre", maps.pre_btn.movedim(-1, 0), stream, "H_pre: what a sublayer reads"),
        Figure("post", maps.post_btn.movedim(-1, 0), stream, "H_post: where the output of a sublayer goes", after=True),
    ]
    if maps.res_btij is None:
        return figures
    distances = torch.stack(distances_of(maps.res_btij))
    panels = "from the identity", "from 1/n"
    return [
        Figure("res", maps.res_btij.permute(2, 3, 0, 1), ("stream", *stream), "mixing maps H_res"),
        *figures,
        Figure(
            "distance", distances, ("panel", "batch", "token"), "the distance of H_res, Frobenius norm", panels=panels
        ),
    ]


def distances_of(res_btij: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Frobenius norms of H_res - 1 and of H_res - 1/n, each x_bt."""
    identity = torch.eye(res_btij.shape[-1]).to(res_btij)
    return (res_btij - identity).norm(dim=(-2, -1)), (res_btij - 1 / len(identity)).norm(dim=(-2, -1))


def stream_diagnostics(name: str, maps: Maps, memory: dict[str, Any]) -> dict[str, Tensor]:
    """Return the mean distances of H_res from the identity and from 1/n over the tokens.

    memory: gets "product", the product of all H_res, and "weights_btnj", the weight of each output j in each stream,
    the embedding first.
    """
    # autocast would round fp32 maps before each product
    ones_btn1 = torch.ones_like(maps.post_btn, dtype=torch.float64)[..., None]
    weights = memory.get("weights_btnj", ones_btn1)
    product = memory.get("product", torch.diag_embed(ones_btn1[..., 0]))
    found = {}
    if maps.res_btij is not None:
        res_btij = maps.res_btij.double()
        weights, product = res_btij @ weights, res_btij @ product
        from_identity, from_mean = distances_of(maps.res_btij)
        found = {f"{name}_res_from_identity": from_identity.mean(), f"{name}_res_from_uniform": from_mean.mean()}
    memory["weights_btnj"], memory["product"] = torch.cat([weights, maps.post_btn[..., None]], -1), product
    return found


def final_diagnostics(name: str, pre_btn: Tensor, memory: dict[str, Any]) -> dict[str, Tensor]:
    """Return the gain of the product of all H_res, its largest absolute row sum, and the share of the embedding.

    The share is the weight of the embedding in the final read over the absolute weights of all outputs. Both are means
    over the tokens. pre_btn: the weights of the streams in the final read.
    """
    share_btj = (pre_btn.double()[..., None, :] @ memory["weights_btnj"])[..., 0, :].abs()
    gain_bt = memory["product"].abs().sum(-1).amax(-1)
    share_bt = share_btj[..., 0] / share_btj.sum(-1)
    return {f"{name}_gain": gain_bt.mean(), f"{name}_embedding_share": share_bt.mean()}
