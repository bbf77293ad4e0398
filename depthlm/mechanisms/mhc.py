"""mHC, manifold-constrained hyper-connections (arXiv 2512.24880): a mixing map that keeps the mean of the streams.

    X <- H_res X + H_post^T f(H_pre X)
    m = alpha * (phi RMSNorm(vec X)) + b,  phi: (n^2 + 2n) x nD, with an alpha for each map
    H_pre = sigmoid(m_pre), 1 x n;  H_post = 2 sigmoid(m_post), 1 x n
    H_res = Sinkhorn-Knopp(exp(m_res)), n x n, nearly doubly stochastic, so that it does not increase the norm of X

X_btnd are n streams of width D, as in hyper_connections, which start as copies of the embedding:

    X_btnd --+-> norm, phi -> H_pre, H_post, H_res
             +-> H_pre X -> sublayer f -> H_post^T -(+)-> X_btnd
             `-> H_res X ----------------------------'

Shapes: b batch, t tokens, n streams (i new, j old), d hidden size.
"""

import math

import torch
from torch import Tensor, nn

from depthlm.mechanisms.hyper_connections import (
    COLLAPSES,
    Carry,
    Collapse,
    State,
    copies,
    map_figures,
    read_with,
    rebuilds,
    stream_cost,
)
from depthlm.model.connection import Connection, Inputs
from depthlm.model.figures import Figure
from depthlm.model.settings import at_least, check, one_of
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.mhc.cpu import Maps, Parameters, Pending, mhc_maps
from depthlm.ops.mhc.naive import mhc_post_pre


class ManifoldHyperConnections(Connection):
    """Hyper-connections whose H_res is nearly doubly stochastic.

    They are initially nearly vanilla: alpha = 0.01 leaves the maps nearly constant, the streams are equal, and every
    output is added to each of them with weight 1.

    num_streams: n.
    iterations: the number of Sinkhorn-Knopp iterations.
    collapse: as in HyperConnections.
    """

    colour = "#CC79A7"

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
        self.num_streams = num_streams
        self.iterations = iterations
        self.eps = backbone.norm_eps
        n, d = num_streams, size.hidden_size
        if spec.kind == "final":
            self.collapse = Collapse(n, collapse)
            return
        self.widths = (n, n, n * n)
        self.norm = nn.Parameter(torch.empty(n * d))
        self.phi = nn.Parameter(torch.empty(sum(self.widths), n * d))
        self.alpha = nn.Parameter(torch.empty(3))
        self.bias = nn.Parameter(torch.empty(sum(self.widths)))
        self.fp32_parameters = tuple(self._parameters)
        self.cost = stream_cost(n, d, maps_flops=2.0 * n * d * (n * n + 2 * n))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        if name == "phi":
            tensor.normal_(0, std, generator=generator)
        elif name == "bias":
            pre, _, res = tensor.split(self.widths)
            n = self.num_streams
            # H_pre = 1/n, H_post = 1 (its bias is 0), H_res = 0.99 on the diagonal; with one stream, H_pre = 1/2
            if n > 1:
                pre.fill_(-math.log(n - 1))
                res.fill_(math.log(0.01 / (n - 1)))
                res.view(n, n).fill_diagonal_(math.log(0.99))
        else:
            tensor.fill_(1.0 if name == "norm" else 0.01)

    def open(self, embedding_btd: Tensor) -> State:
        return State(copies(embedding_btd, self.num_streams))

    def read(self, state: State, weights: Maps | None = None) -> tuple[Inputs, Carry]:
        if weights is not None:
            return read_with(weights, state)
        input_btd, *carry = mhc_post_pre(
            state.streams,
            state.pending,
            self.map_parameters(),
            self.eps,
            self.iterations,
            rebuilds(self, state.streams),
        )
        return (input_btd,), Carry(*carry)

    def weights(self, state: State) -> Maps | None:
        if self.spec.kind == "final":
            return None
        return mhc_maps(state.written(), self.map_parameters(), self.eps, self.iterations)

    def map_parameters(self) -> Parameters:
        """Return the parameters of the maps, as the operator takes them."""
        return Parameters(self.phi, self.norm, self.alpha, self.bias)

    def write(self, state: State, output_btd: Tensor, carry: Carry) -> State:
        return State(carry.streams, Pending(output_btd, carry.post_btn, carry.res_btij))

    def close(self, state: State) -> Tensor:
        return self.collapse(state.written())

    def figures(self, state: State) -> list[Figure]:
        return map_figures(self.weights(state))

    def diagnostics(self, state: State) -> dict[str, Tensor]:
        """Return |sum - 1| of each row and column of H_res; those of rows are exact up to rounding."""
        maps = self.weights(state)
        if maps is None:
            return {}
        sums = {"row": maps.res_btij.sum(-1), "column": maps.res_btij.sum(-2)}
        return {f"mhc_{name}_deviation": (total - 1).abs() for name, total in sums.items()}
