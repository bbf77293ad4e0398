"""Depth Dense, a reference design of MoDA (arXiv 2603.15619, section 2.2 and Table 1), after DenseNet (1608.06993).

h_s = W_s [X_0; X_1; ...; X_s], with the embedding X_0, the output X_j of sublayer j - 1 and W_s: D x (s + 1)D

X_0 ... X_s --concatenated--> W_s -> h_s -> sublayer -> X_{s+1}
"""

from typing import NamedTuple

import torch
from torch import Tensor

from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.layers import Linear
from depthlm.model.shape import Backbone, Size, SublayerSpec


class State(NamedTuple):
    """outputs: X_0, ..., X_s."""

    outputs: tuple[Tensor, ...]


class DepthDense(Connection):
    """Every sublayer reads a linear projection of the embedding and all earlier outputs.

    Assumed: the layers of the paper are sublayers, and the final hidden state is one more projection. Each W_s
    initially consists of identity matrices, so that the decoder equals vanilla, and has no weight decay.
    """

    identity_start = ""
    accumulates = "sum"

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__(spec, size, backbone)
        num_sources, d = spec.sublayer + 1, size.hidden_size
        self.proj = Identities(num_sources * d, d, bias=False)
        self.optimizer_settings = {"proj.weight": {"weight_decay": 0.0}}
        self.cost = Cost(io_values=float(d * (num_sources + 1)))

    def open(self, embedding_btd: Tensor) -> State:
        return State((embedding_btd,))

    def read(self, state: State, weights: None = None) -> tuple[Inputs, None]:
        return (self.proj(torch.cat(state.outputs, -1)),), None

    def write(self, state: State, output_btd: Tensor, carry: None) -> State:
        return State((*state.outputs, output_btd))


class Identities(Linear):
    """A linear layer that initially returns the sum of its sources."""

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.copy_(torch.eye(len(tensor)).repeat(1, tensor.shape[1] // len(tensor)))
