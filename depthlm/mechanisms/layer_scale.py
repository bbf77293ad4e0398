"""LayerScale (arXiv 2103.17239), a row of Table 5 of Attention Residuals (arXiv 2603.15031).

h <- h + diag(lambda) f(h)

With form=affine, both terms have a factor and a bias (ZAYA1; transformers 5.23.0, `ZayaResidualScaling`):

h <- diag(s_0) (h + b_0) + diag(s_1) (f(h) + b_1)

h_btd --+----------------------------(+)-> h_btd
        `-> sublayer f -> * lambda ---'
"""

import torch
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Hidden, Inputs
from depthlm.model.settings import check, number, one_of
from depthlm.model.shape import Backbone, Size, SublayerSpec


class LayerScale(Connection):
    """A residual connection with a learned factor per channel of the output.

    start: the initial lambda; None: that of the paper for the depth, 0.1 up to 18 layers, 1e-5 up to 24, else 1e-6.
        With 1.0, the decoder initially equals vanilla.
    form: output; affine: as above, with start for s_1, by default 1.0; s_0 is initially 1, and biases are 0.
    """

    why_undefined = "its start follows the depth; give model.connection.start"
    identity_start = "start=1.0"

    def __init__(
        self, spec: SublayerSpec, size: Size, backbone: Backbone, start: float | None = None, form: str = "output"
    ):
        super().__init__(spec, size, backbone)
        check([] if start is None else number(0.0, start=start), one_of(("output", "affine"), form=form))
        self.is_affine = form == "affine"
        self.accumulates = None if self.is_affine or start is None else "sum"
        start = 1.0 if self.is_affine and start is None else start
        depth = spec.num_layers
        self.start = start if start is not None else 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6
        self.identity_start = "" if self.start == 1 else self.identity_start
        if spec.kind != "final":
            d = size.hidden_size
            self.scale = nn.Parameter(torch.empty(d))
            if self.is_affine:
                self.bias, self.skip_bias, self.skip_scale = (nn.Parameter(torch.empty(d)) for _ in range(3))
            self.fp32_parameters = tuple(self._parameters)
            self.cost = Cost(flops=d * (4.0 if self.is_affine else 1.0))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.fill_({"scale": self.start, "skip_scale": 1.0}.get(name, 0.0))

    def read(self, state: Hidden, weights: None = None) -> tuple[Inputs, None]:
        return (state.h,), None

    def write(self, state: Hidden, output_btd: Tensor, carry: None) -> Hidden:
        h = state.h
        if self.is_affine:
            h, output_btd = (h + self.skip_bias) * self.skip_scale, output_btd + self.bias
        return Hidden((h + self.scale * output_btd).to(state.h.dtype))
