"""Hyper-connections (arXiv 2409.19606) and manifold-constrained hyper-connections, mHC (arXiv 2512.24880).

    X <- H_res X + H_post^T f(H_pre X)

X consists of n streams of width D, which start as copies of the embedding:

    X_btnd --+-> H_pre X -> sublayer f -> H_post^T -(+)-> X_btnd
             `-> H_res X ----------------------------'

A write is deferred: it only stores its arguments, and one operator performs the write and the next read. The stream is
[X] before the first sublayer, then [X, y, H_post, H_res], which represents H_res X + H_post^T y. On a GPU, some streams
are computed again in the backward pass (`depthlm.kernels.mhc.rebuilding`).

Shapes: b batch, t tokens, n streams (i new, j old), d hidden size.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from depthlm.kernels.hyper_connections.reference import Dynamic, Static, hyper_maps, hyper_post_pre
from depthlm.kernels.mhc.reference import Pending, mhc_maps, mhc_post_pre, write_streams
from depthlm.kernels.mhc.streams import read_streams
from depthlm.model.connections.connection import Connection, Inputs, Stream
from depthlm.model.settings import at_least, boolean, check, one_of
from depthlm.model.shape import Backbone, Size
from depthlm.model.sublayer_spec import SublayerSpec

COLLAPSES = ("mean", "sum", "learned")


class HyperConnections(Connection):
    """Hyper-connections.

    H = static + s * tanh(norm(X) W) for each of H_pre, H_post and H_res. The static part initially equals vanilla. The
    dynamic part depends on each stream.

    num_streams: n.
    dynamic: whether the maps have a dynamic part. Without one, PyTorch runs for any choice of kernels.
    collapse: how the streams become the final hidden state: mean, sum, or learned, a learned softmax average.
    """

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
        self.num_streams, self.dynamic, self.eps = num_streams, dynamic, backbone.norm_eps
        self.rebuild = False
        n, d = num_streams, size.hidden_size
        self.collapse = Collapse(n, collapse) if spec.kind == "final" else None
        if self.collapse is not None:
            return
        self.static_pre = nn.Parameter(torch.empty(n))
        self.static_post = nn.Parameter(torch.empty(n))
        self.static_res = nn.Parameter(torch.empty(n, n))
        self.optimizer_settings = {name: {"weight_decay": 0.0} for name in ("static_pre", "static_post", "static_res")}
        if dynamic:
            self.w = nn.Parameter(torch.empty(n + 2, d))
            self.scale = nn.Parameter(torch.empty(2))
        self.fp32_parameters = tuple(self._parameters)

    def link(self, connections: Sequence[Connection]) -> None:
        # with activation checkpointing, the streams within a layer are computed again in any case
        self.rebuild = len(connections) > 1

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        if name == "static_pre":
            tensor[self.spec.sublayer % self.num_streams] = 1.0
        elif name == "static_res":
            tensor.fill_diagonal_(1.0)
        else:
            tensor.fill_({"static_post": 1.0, "w": 0.0, "scale": 0.01}[name])

    def open(self, embedding_btd: Tensor) -> Stream:
        return [copies(embedding_btd, self.num_streams)]

    def read(self, stream: Stream) -> tuple[Inputs, tuple[Tensor, Tensor, Tensor]]:
        x_btnd, pending = _pending(stream)
        rebuild = self.rebuild and scarce_memory(x_btnd)
        input_btd, x_btnd, post_btn, res_btij = hyper_post_pre(x_btnd, pending, *self._parts(), self.eps, rebuild)
        return (input_btd,), (x_btnd, post_btn, res_btij)

    def linear_read(self, stream: Stream) -> tuple[Inputs, tuple[Tensor, Tensor, Tensor]]:
        return _linear_read(self, _written(stream))

    def maps(self, x_btnd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return H_pre, H_post and H_res of every token."""
        return hyper_maps(x_btnd, *self._parts(), self.eps)

    def _parts(self) -> tuple[Static, Dynamic | None]:
        static = self.static_pre, self.static_post, self.static_res
        return static, (self.w, self.scale) if self.dynamic else None

    def write(self, stream: Stream, output_btd: Tensor, carry: tuple[Tensor, Tensor, Tensor]) -> Stream:
        return _deferred(output_btd, carry)

    def streams(self, stream: Stream) -> Tensor:
        """Return X_btnd, with the pending write applied."""
        return _written(stream)

    def materialize(self, stream: Stream) -> Stream:
        return [_written(stream)]

    def close(self, stream: Stream) -> Tensor:
        assert self.collapse is not None
        return self.collapse(_written(stream))

    def forward_flops(self, length: float, causal: bool) -> float:
        if self.collapse is not None:
            return 0.0
        n, d = self.num_streams, self.size.hidden_size
        return stream_flops(n, d) + (2.0 * n * d * (n + 2) if self.dynamic else 0.0)

    def io_values(self) -> float:
        return 0.0 if self.collapse is not None else stream_values(self.num_streams, self.size.hidden_size)


class ManifoldHyperConnections(Connection):
    """mHC: hyper-connections whose maps preserve the magnitude of the signal.

    x' = RMSNorm(vec X);  m = alpha * (x' phi) + b, with an alpha for each map
    H_pre = sigmoid(m_pre), H_post = 2 sigmoid(m_post), H_res = Sinkhorn-Knopp(exp(m_res)), nearly doubly stochastic

    num_streams: n.
    iterations: the number of Sinkhorn-Knopp iterations.
    collapse: as in HyperConnections.
    """

    def __init__(
        self,
        spec: SublayerSpec,
        size: Size,
        backbone: Backbone,
        num_streams: int = 4,
        iterations: int = 20,
        collapse: str = "mean",
    ):
        super().__init__(spec, size, backbone)
        check(at_least(1, num_streams=num_streams, iterations=iterations), one_of(COLLAPSES, collapse=collapse))
        self.num_streams, self.iterations, self.eps = num_streams, iterations, backbone.norm_eps
        self.rebuild = False
        self.collapse = Collapse(num_streams, collapse) if spec.kind == "final" else None
        if self.collapse is not None:
            return
        n, width = num_streams, num_streams * size.hidden_size
        self.widths = (n, n, n * n)
        self.norm = nn.Parameter(torch.empty(width))
        self.phi = nn.Parameter(torch.empty(sum(self.widths), width))
        self.alpha = nn.Parameter(torch.empty(3))
        self.bias = nn.Parameter(torch.empty(sum(self.widths)))
        self.fp32_parameters = tuple(self._parameters)

    def link(self, connections: Sequence[Connection]) -> None:
        # with activation checkpointing, the streams within a layer are computed again in any case
        self.rebuild = len(connections) > 1

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        if name == "phi":
            tensor.normal_(0, std, generator=generator)
        elif name == "bias":
            pre, _, res = tensor.split(self.widths)
            n = self.num_streams
            if n > 1:  # nearly vanilla: H_pre = 1/n, H_post = 1, H_res = 0.99 on the diagonal
                pre.fill_(-math.log(n - 1))
                res.fill_(math.log(0.01 / (n - 1)))
                res.view(n, n).fill_diagonal_(math.log(0.99))
        else:
            tensor.fill_(1.0 if name == "norm" else 0.01)

    def open(self, embedding_btd: Tensor) -> Stream:
        return [copies(embedding_btd, self.num_streams)]

    def read(self, stream: Stream) -> tuple[Inputs, tuple[Tensor, Tensor, Tensor]]:
        x_btnd, pending = _pending(stream)
        rebuild = self.rebuild and scarce_memory(x_btnd)
        input_btd, x_btnd, post_btn, res_btij = mhc_post_pre(
            x_btnd, pending, self.phi, self.alpha, self.bias, self.eps, self.iterations, rebuild, self.norm
        )
        return (input_btd,), (x_btnd, post_btn, res_btij)

    def linear_read(self, stream: Stream) -> tuple[Inputs, tuple[Tensor, Tensor, Tensor]]:
        return _linear_read(self, _written(stream))

    def maps(self, x_btnd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return H_pre, H_post and H_res of every token."""
        return mhc_maps(x_btnd, self.norm * self.phi, self.alpha, self.bias, self.eps, self.iterations)

    def write(self, stream: Stream, output_btd: Tensor, carry: tuple[Tensor, Tensor, Tensor]) -> Stream:
        return _deferred(output_btd, carry)

    def streams(self, stream: Stream) -> Tensor:
        """Return X_btnd, with the pending write applied."""
        return _written(stream)

    def materialize(self, stream: Stream) -> Stream:
        return [_written(stream)]

    def close(self, stream: Stream) -> Tensor:
        assert self.collapse is not None
        return self.collapse(_written(stream))

    def diagnostics(self, stream: Stream) -> dict[str, Tensor]:
        """Return the distance of H_res from its manifold, where all rows and columns sum to 1."""
        if self.collapse is not None:
            return {}
        _, _, res_btij = self.maps(_written(stream))
        sums = {"row": res_btij.sum(-1), "column": res_btij.sum(-2)}
        return {f"mhc_{name}_deviation": (total - 1).abs() for name, total in sums.items()}

    def forward_flops(self, length: float, causal: bool) -> float:
        if self.collapse is not None:
            return 0.0
        n, d = self.num_streams, self.size.hidden_size
        return stream_flops(n, d) + 2.0 * n * d * (n * n + 2 * n)

    def io_values(self) -> float:
        return 0.0 if self.collapse is not None else stream_values(self.num_streams, self.size.hidden_size)


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


def _deferred(output_btd: Tensor, carry: tuple[Tensor, Tensor, Tensor]) -> Stream:
    x_btnd, post_btn, res_btij = carry
    return [x_btnd, output_btd, post_btn, res_btij]


def _linear_read(
    connection: HyperConnections | ManifoldHyperConnections, x_btnd: Tensor
) -> tuple[Inputs, tuple[Tensor, Tensor, Tensor]]:
    pre_btn, post_btn, res_btij = (map_of_tokens.detach() for map_of_tokens in connection.maps(x_btnd))
    return (read_streams(pre_btn, x_btnd),), (x_btnd, post_btn, res_btij)


def _pending(stream: Stream) -> tuple[Tensor, Pending | None]:
    x_btnd, *rest = stream
    return x_btnd, (rest[0], rest[1], rest[2]) if rest else None


def _written(stream: Stream) -> Tensor:
    """Return X_btnd, with the pending write applied."""
    x_btnd, pending = _pending(stream)
    return x_btnd if pending is None else write_streams(x_btnd, pending)


def scarce_memory(x: Tensor) -> bool:
    """Return whether memory is worth the time of computing streams again: on a GPU, but not on a CPU."""
    return x.is_cuda


def copies(embedding_btd: Tensor, num_streams: int) -> Tensor:
    """Return X_btnd before the first sublayer."""
    return embedding_btd[:, :, None].expand(-1, -1, num_streams, -1)


def stream_flops(n: int, d: int) -> float:
    """Return the FLOPs per token of H_pre X, H_res X and H_post^T y."""
    return 2.0 * d * (2 * n + n * n)


def stream_values(n: int, d: int) -> float:
    """Return the values per token read and written for X, the input and the output, less the residual connection's 3 D.

    The Depth-Attention paper (appendix B.5) counts 23 D for n = 4.
    """
    return float(d * (6 * n + 2 - 3))
