"""ReZero (arXiv 2003.04887), a row of Table 5 of Attention Residuals (arXiv 2603.15031): h <- h + alpha f(h).

h_btd --+----------------------------(+)-> h_btd
        `-> sublayer f -> * alpha ----'
"""

import torch
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Hidden, Inputs
from depthlm.model.shape import Backbone, Size, SublayerSpec


class ReZero(Connection):
    """A residual connection with one parameter alpha for each sublayer, initially zero.

    Assumed: the sublayers keep the norms of the backbone. The paper removes them, but Table 5 omits all norms.
    """

    accumulates = "sum"

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__(spec, size, backbone)
        if spec.kind != "final":
            self.alpha = nn.Parameter(torch.empty(1))
            self.cost = Cost(flops=1.0 * size.hidden_size)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.zero_()

    def read(self, state: Hidden, weights: None = None) -> tuple[Inputs, None]:
        return (state.h,), None

    def write(self, state: Hidden, output_btd: Tensor, carry: None) -> Hidden:
        return Hidden(state.h + self.alpha * output_btd)
