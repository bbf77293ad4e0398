"""Layer attention after MRLA (arXiv 2302.03985), a row of Table 5 of Attention Residuals (arXiv 2603.15031).

h_s = sum_{j=1..s} alpha_j v_j,  alpha_j = sigmoid(W_q X_s) . sigmoid(W_k X_j) / e,  v_j = c_j * X_j,  c_j in R^D

X_j -+-> W_k, sigmoid -> k_j --.           for all j = 1 ... s
     `-> * c_j --------> v_j --|
X_s ---> W_q, sigmoid ------> alpha --> h_s -> sublayer -> X_{s+1}
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.layers import Linear
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.depth_reduce import source_scores, weighted_sum


class State(NamedTuple):
    """newest: X_s. keys, values: k_j and v_j of all outputs before it."""

    newest: Tensor
    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()


class MRLA(Connection):
    """Every sublayer reads a sum over all earlier outputs X_j, with gates that depend on the newest output X_s.

    X_0 is the embedding. As in the table, only the first sublayer reads it.

    Assumed: ConvPool is a projection of the token to e = head_size, because a mean over an image has no causal
    counterpart. Conv is one weight per channel, MRLA's depthwise convolution at a single position. Both belong to
    the output that they read, and sigma is a sigmoid. Table 5 omits norms; ours is the mean over e in place of the sum.
    """

    why_undefined = "no read but the first has the embedding, beside which the outputs would be small"

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__(spec, size, backbone)
        self.num_sources = spec.sublayer
        d = size.hidden_size
        e = size.head_size
        if self.num_sources:
            self.q_proj = Linear(d, e, bias=False)
            self.k_proj = Linear(d, e, bias=False)
            self.c = nn.Parameter(torch.empty(d))
            # the newest output and h, and the keys and values written and read
            values = 2.0 * d + (d + e) * (self.num_sources + 1)
            self.cost = Cost(2.0 * self.num_sources * (d + e) + d, values)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.fill_(1.0)

    def open(self, embedding_btd: Tensor) -> State:
        return State(embedding_btd)

    def read(self, state: State, weights: Tensor | None = None) -> tuple[Inputs, State]:
        if not self.num_sources:
            return (state.newest,), state
        keys, values = self.entries(state)
        alpha_nbt = self.alpha(state, keys) if weights is None else weights
        return (weighted_sum(alpha_nbt, values),), State(state.newest, keys, values)

    def weights(self, state: State) -> Tensor | None:
        """Return alpha_nbt."""
        return self.alpha(state, self.entries(state)[0]) if self.num_sources else None

    def entries(self, state: State) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the keys and values with those of the newest output."""
        newest = state.newest
        return (*state.keys, self.k_proj(newest).sigmoid()), (*state.values, (self.c * newest).to(newest.dtype))

    def alpha(self, state: State, keys: Sequence[Tensor]) -> Tensor:
        alpha_nbt = source_scores(self.q_proj(state.newest).sigmoid() / self.size.head_size, keys, eps=None)
        return self.edited(alpha_nbt, ("source", "batch", "token"), range(1, len(keys) + 1))

    def write(self, state: State, output_btd: Tensor, carry: State) -> State:
        # only the first sublayer reads the embedding
        return State(output_btd, carry.keys, carry.values)
