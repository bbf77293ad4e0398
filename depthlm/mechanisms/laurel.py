"""LAuReL, the learned augmented residual layer (arXiv 2411.07501): x_{i+1} = f(x_i) + g(x_i, x_{i-1}, ...).

rw, residual weights:       alpha f(x_i) + beta x_i
lr, low rank:               f(x_i) + B A x_i + x_i
pa, previous activations:   f(x_i) + x_i + sum_{j=0..k-1} gamma_j B A x_{i-j}

x_i --+-> sublayer f ---(+)-> x_{i+1}
      +--- skip --------^
      `--- B A x -------'
"""

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.edges import per_token
from depthlm.model.figures import Figure
from depthlm.model.settings import at_least, check, one_of
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.depth_reduce import weighted_sum


class State(NamedTuple):
    """inputs: x_i, x_{i-1}, ..., x_{i-k+1} of pa, the newest first; x_i of the other variants."""

    inputs: tuple[Tensor, ...]


class Laurel(Connection):
    """A residual connection with learned weights or a learned low-rank term.

    variant: rw, lr or pa.
    rank: r of A (r x D) and B (D x r, initially zero), for lr and pa.
    last_k: k, for pa. It counts the input of this sublayer.
    """

    colour = "#999933"
    identity_start = ""
    accumulates = "sum"
    width_exponents: ClassVar = {"down": 1.0}
    depth_exponents: ClassVar = {"up": 1.0, "beta": 1.0}

    def __init__(
        self, spec: SublayerSpec, size: Size, backbone: Backbone, variant: str = "pa", rank: int = 8, last_k: int = 3
    ):
        super().__init__(spec, size, backbone)
        check(one_of(("rw", "lr", "pa"), variant=variant), at_least(1, rank=rank, last_k=last_k))
        self.variant = variant
        self.last_k = last_k
        d = size.hidden_size
        if spec.kind == "final":
            return
        if variant == "rw":
            self.alpha = nn.Parameter(torch.empty(1))
            self.beta = nn.Parameter(torch.empty(1))
            self.cost = Cost(flops=2.0 * d)
            return
        self.down = nn.Parameter(torch.empty(rank, d))
        self.up = nn.Parameter(torch.empty(d, rank))
        num_sources = min(last_k, spec.sublayer + 1) if variant == "pa" else 0
        if variant == "pa":
            self.gamma = nn.Parameter(torch.empty(num_sources))
        # the sources, x read for A, and the products with A and B written and read
        self.cost = Cost(4.0 * rank * d + 2.0 * d * num_sources, float(d * num_sources + 2 * (d + rank)))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        if name == "down":
            tensor.normal_(0, std, generator=generator)
        else:
            tensor.fill_(0.0 if name == "up" else 1.0)

    def open(self, embedding_btd: Tensor) -> State:
        return State((embedding_btd,))

    def read(self, state: State, weights: None = None) -> tuple[Inputs, None]:
        return (state.inputs[0],), None

    def write(self, state: State, output_btd: Tensor, carry: None) -> State:
        x = state.inputs[0]
        if self.variant == "rw":
            return State(((self.alpha * output_btd + self.beta * x).to(x.dtype),))
        # B A is linear, so it is applied once to the weighted sum
        z = x if self.variant == "lr" else weighted_sum(self.edited_gamma(x), state.inputs)
        y = x + output_btd + F.linear(F.linear(z, self.down), self.up)
        return State((y, *state.inputs)[: self.last_k] if self.variant == "pa" else (y,))

    def edited_gamma(self, x: Tensor) -> Tensor:
        """Return gamma, or what `edit` makes of it for each token. Sources are numbered by their sublayers."""
        if self.edit is None:
            return self.gamma
        sources = [self.spec.sublayer - j for j in range(len(self.gamma))]
        return self.edited(per_token(self.gamma, x), ("source", "batch", "token"), sources)

    def figures(self, state: State) -> list[Figure]:
        about = "the learned weights of each sublayer"
        if hasattr(self, "gamma"):
            return [Figure("gamma", self.gamma, ("source",), about, "source (j: the input j sublayers before)")]
        if hasattr(self, "alpha"):
            weights = torch.cat((self.alpha, self.beta))
            return [Figure("weights", weights, ("panel",), about, panels=("alpha, of the output", "beta, of the skip"))]
        return []
