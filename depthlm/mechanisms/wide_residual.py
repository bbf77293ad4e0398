"""Wide residual (NVIDIA/Megatron-LM, pull request 6716): n residual streams, with weights that no token changes.

    u = sum_i r_i X_i,  X_i <- X_i + w_i f(u),  r_i = sigmoid(a_i),  w_i = 2 sigmoid(b_i)

and a read of its own, with other r_i, gives the final hidden state. The streams start as copies of the embedding and
are not mixed, so this shows what streams give without maps that depend on them. Megatron's retention, an optional
factor of X_i near 1, is left out.

X_i ---+----------------------------(+)-> X_i      i = 1 ... n
       `-> * r_i -> sum -> f -> * w_i ^
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.figures import Figure
from depthlm.model.settings import at_least, check
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.depth_reduce import weighted_sum

# the initial b_i lie evenly between -SPREAD and SPREAD: the w_i differ, and their mean is 1
SPREAD = 0.01


class State(NamedTuple):
    """streams: X_1, ..., X_n."""

    streams: tuple[Tensor, ...]


class WideResidual(Connection):
    """Every sublayer reads a weighted sum of the streams and writes to each with a weight. Initially equals vanilla.

    num_streams: n, at least 2.
    """

    accumulates = "sum"
    identity_start = ""

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone, num_streams: int = 3):
        super().__init__(spec, size, backbone)
        check(at_least(2, num_streams=num_streams))
        n, d = num_streams, size.hidden_size
        self.num_streams = n
        self.read_logits = nn.Parameter(torch.empty(n))
        # n streams read, the input written; the output and n streams read, n streams written; less those of vanilla
        self.cost = Cost(2.0 * n * d)
        if spec.kind != "final":
            self.write_logits = nn.Parameter(torch.empty(n))
            self.cost = Cost(4.0 * n * d, float(d * (3 * n + 2 - 3)))
        self.fp32_parameters = tuple(self._parameters)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        n = self.num_streams
        if name == "read_logits":
            tensor.fill_(-math.log(n - 1))
        else:
            tensor.copy_(torch.linspace(-SPREAD, SPREAD, n))

    def open(self, embedding_btd: Tensor) -> State:
        return State((embedding_btd,) * self.num_streams)

    def read(self, state: State, weights: None = None) -> tuple[Inputs, None]:
        return (weighted_sum(self.read_logits.sigmoid(), state.streams),), None

    def write(self, state: State, output_btd: Tensor, carry: None) -> State:
        weights = 2 * self.write_logits.sigmoid()
        # without a dimension, a weight would be rounded to the dtype of the output
        pairs = zip(weights.split(1), state.streams, strict=True)
        return State(tuple((x + w * output_btd).to(x.dtype) for w, x in pairs))

    def figures(self, state: State) -> list[Figure]:
        read = Figure("read", self.read_logits.sigmoid(), ("stream",), "what a sublayer reads of each stream")
        if self.spec.kind == "final":
            return [read]
        about = "how much of its output a sublayer writes to each stream"
        return [read, Figure("write", 2 * self.write_logits.sigmoid(), ("stream",), about, after=True)]
