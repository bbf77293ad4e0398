"""Depth Dense, a reference design of MoDA (arXiv 2603.15619, section 2.2 and Table 1), after DenseNet (1608.06993)."""

import torch
from torch import Tensor

from depthlm.model.connections.connection import Connection, Inputs, Stream
from depthlm.model.layers import Linear
from depthlm.model.shape import Backbone, Size
from depthlm.model.sublayer_spec import SublayerSpec


class DepthDense(Connection):
    """Every sublayer reads a linear projection of the embedding and all earlier outputs.

    h_s = W_s [X_0; X_1; ...; X_s], with the embedding X_0, the output X_j of sublayer j - 1 and W_s: D x (s + 1)D

    Assumed: the layers of the paper are sublayers, and the final hidden state is one more projection. Each W_s
    initially consists of identity matrices, so that the decoder equals vanilla, and has no weight decay.
    """

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__(spec, size, backbone)
        self.num_sources = spec.sublayer + 1
        self.proj = Identities(self.num_sources * size.hidden_size, size.hidden_size, bias=False)
        self.optimizer_settings = {"proj.weight": {"weight_decay": 0.0}}

    def read(self, stream: Stream) -> tuple[Inputs, None]:
        return (self.proj(torch.cat(stream, -1)),), None

    def write(self, stream: Stream, output_btd: Tensor, carry: None) -> Stream:
        return [*stream, output_btd]

    def io_values(self) -> float:
        return float(self.size.hidden_size * (self.num_sources + 1))


class Identities(Linear):
    """A linear layer that initially returns the sum of its sources."""

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.copy_(torch.eye(len(tensor)).repeat(1, tensor.shape[1] // len(tensor)))
