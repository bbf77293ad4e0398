"""AltUp (arXiv 2301.13310) in the form of Gemma 3n (transformers 5.23.0, `Gemma3nTextAltUp`): layers update one stream.

    r(x) = tanh(W_r RMSNorm(x) / D) in R^n
    P_i = X_i + sum_j A_ij X_j,  A = W_p r(X_0) in R^(n x n)           before a layer: predict
    o = P_0 + attention + MLP                                          the layer reads and writes P_0 alone
    X_i <- P_i + (1 + (W_c r(o))_i) (o - P_0)                          behind it: correct

X_0 is the embedding, and X_i = W_i X_0 with the size of X_0. The final hidden state is the mean of X_0 and of all
U_i X_i with the size of X_0.

X_i -> predict -> P_i --------------------------------------- correct -> X_i      i = 0 ... n - 1
                  P_0 -+-> attention -(+)-> MLP -(+)-> o --------^

Shapes: b batch, t tokens, d hidden size, n streams (i new, j old).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.figures import Figure
from depthlm.model.layers import Linear
from depthlm.model.settings import at_least, check
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.depth_reduce import weighted_sum
from depthlm.ops.dtypes import upcast
from depthlm.ops.functions import rms_norm


class State(NamedTuple):
    """streams: X_i, within a layer P_i. h: the first of them, plus outputs. router_nd: within a layer, W_r with the
    weight of the norm, divided by D.
    """

    streams: tuple[Tensor, ...]
    h: Tensor
    router_nd: Tensor | None = None


class AltUp(Connection):
    """A layer reads and writes one of n streams; the others are predicted before it and corrected behind it.

    num_streams: n, at least 2.
    """

    colour = "#332288"
    why_undefined = "it multiplies the streams in every layer"

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone, num_streams: int = 4):
        super().__init__(spec, size, backbone)
        check(at_least(2, num_streams=num_streams))
        n, d, self.eps = num_streams, size.hidden_size, backbone.norm_eps
        if spec.sublayer == 0 or spec.kind == "final":
            self.proj = nn.ModuleList(Linear(d, d, bias=False) for _ in range(n - 1))
        if spec.kind == "attention":
            self.norm = nn.Parameter(torch.empty(d))
            self.router = nn.Parameter(torch.empty(n, d))
            self.predict = nn.Parameter(torch.empty(n * n, n))
            # X_0 read for r; n streams read and written
            self.cost = Cost(2.0 * n * d + 2.0 * n * n * d, float(d * (2 * n + 1)))
        elif spec.kind == "mlp":
            self.correct = nn.Parameter(torch.empty(n, n))
            # o read for r; o and n streams read, n streams written
            self.cost = Cost(4.0 * n * d, float(d * (2 * n + 2)))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.fill_(1.0) if name == "norm" else tensor.normal_(0, std, generator=generator)

    def open(self, embedding_btd: Tensor) -> State:
        return State((embedding_btd, *self.project((embedding_btd,) * len(self.proj), embedding_btd)), embedding_btd)

    def project(self, streams: tuple[Tensor, ...], like_btd: Tensor) -> list[Tensor]:
        """Return a projection of each stream, scaled to the root mean square of another tensor.

        The floor of 1e-5 is that of Gemma3nTextModel.
        """
        target = upcast(like_btd).square().mean(-1, keepdim=True)
        projected = [upcast(proj(x)) for proj, x in zip(self.proj, streams, strict=True)]
        squares = [y.square().mean(-1, keepdim=True).clamp(min=1e-5) for y in projected]
        return [(y * (target / square).sqrt()).to(like_btd.dtype) for y, square in zip(projected, squares, strict=True)]

    def read(self, state: State, weights: None = None) -> tuple[Inputs, State]:
        if self.spec.kind == "mlp":
            return (state.h,), state
        if self.spec.kind == "final":
            return (torch.stack([state.h, *self.project(state.streams[1:], state.h)]).mean(0),), state
        predicted = tuple(weighted_sum(map_jbt, state.streams) for map_jbt in self.maps(state))
        return predicted[:1], State(predicted, predicted[0], self.scaled_router())

    def scaled_router(self) -> Tensor:
        return self.router * self.norm / self.size.hidden_size

    def maps(self, state: State) -> Tensor:
        """Return 1 + A as x_ijbt."""
        n, r_btn = len(state.streams), self.route(state.h, self.scaled_router())
        a_btij = upcast(F.linear(r_btn, self.predict)).unflatten(-1, (n, n))
        return (a_btij + torch.eye(n, dtype=a_btij.dtype, device=a_btij.device)).permute(2, 3, 0, 1)

    def route(self, x_btd: Tensor, router_nd: Tensor) -> Tensor:
        """Return r(x) as r_btn."""
        x_btd = rms_norm(x_btd, None, self.eps).to(router_nd.dtype)
        return upcast(F.linear(x_btd, router_nd)).tanh().to(router_nd.dtype)

    def write(self, state: State, output_btd: Tensor, carry: State) -> State:
        h = (carry.h + output_btd).to(carry.h.dtype)
        if self.spec.kind == "attention":
            return carry._replace(h=h)
        assert carry.router_nd is not None
        gates_btn = 1 + upcast(F.linear(self.route(h, carry.router_nd), self.correct))
        change = h - carry.streams[0]
        pairs = zip(carry.streams, gates_btn.unbind(-1), strict=True)
        corrected = tuple((x + gate[..., None] * change).to(x.dtype) for x, gate in pairs)
        return State(corrected, corrected[0])

    def retained(self, state: State) -> list[Tensor]:
        # the router is made of parameters
        return super().retained(state._replace(router_nd=None))

    def figures(self, state: State) -> list[Figure]:
        if self.spec.kind != "attention":
            return []
        axes, about = ("stream", "batch", "token"), "what each layer reads of each stream"
        return [Figure("weights", self.maps(state)[0], axes, about)]
