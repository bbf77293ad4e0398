"""LayerScale (arXiv 2103.17239), a row of Table 5 of Attention Residuals (arXiv 2603.15031).

h <- h + diag(lambda) f(h)

h_btd --+----------------------------(+)-> h_btd
        `-> sublayer f -> * lambda ---'
"""

import torch
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Hidden, Inputs
from depthlm.model.settings import check, number
from depthlm.model.shape import Backbone, Size, SublayerSpec


class LayerScale(Connection):
    """A residual connection with a learned factor per channel of the output.

    start: the initial lambda; None: that of the paper for the depth, 0.1 up to 18 layers, 1e-5 up to 24, else 1e-6.
        With 1.0, the decoder initially equals vanilla.
    """

    why_undefined = "its start follows the depth; give model.connection.start"
    identity_start = "start=1.0"

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone, start: float | None = None):
        super().__init__(spec, size, backbone)
        check([] if start is None else number(0.0, start=start))
        self.accumulates = None if start is None else "sum"
        depth = spec.num_layers
        self.start = start if start is not None else 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6
        self.identity_start = "" if self.start == 1 else self.identity_start
        if spec.kind != "final":
            self.scale = nn.Parameter(torch.empty(size.hidden_size))
            self.fp32_parameters = ("scale",)
            self.cost = Cost(flops=1.0 * size.hidden_size)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.fill_(self.start)

    def read(self, state: Hidden, weights: None = None) -> tuple[Inputs, None]:
        return (state.h,), None

    def write(self, state: Hidden, output_btd: Tensor, carry: None) -> Hidden:
        return Hidden((state.h + self.scale * output_btd).to(state.h.dtype))
