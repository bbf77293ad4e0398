"""ReZero (arXiv 2003.04887), a row of Table 5 of Attention Residuals (arXiv 2603.15031): h <- h + alpha f(h).

h_btd --+----------------------------(+)-> h_btd
        `-> sublayer f -> * alpha ----'
"""

import torch
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Hidden, Inputs
from depthlm.model.settings import check, one_of
from depthlm.model.shape import Backbone, Size, SublayerSpec

ALPHA = {"paper": 0.0, "identity": 1.0}


class ReZero(Connection):
    """A residual connection with one parameter alpha for each sublayer, initially zero.

    Assumed: the sublayers keep the norms of the backbone. The paper removes them, but Table 5 omits all norms.

    start: paper; identity: alpha is initially 1, so that the decoder initially equals vanilla.
    """

    identity_start = "start=identity"
    accumulates = "sum"

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone, start: str = "paper"):
        super().__init__(spec, size, backbone)
        check(one_of(ALPHA, start=start))
        self.start = start
        self.identity_start = "" if start == "identity" else self.identity_start
        if spec.kind != "final":
            self.alpha = nn.Parameter(torch.empty(1))
            self.cost = Cost(flops=1.0 * size.hidden_size)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.fill_(ALPHA[self.start])

    def read(self, state: Hidden, weights: None = None) -> tuple[Inputs, None]:
        return (state.h,), None

    def write(self, state: Hidden, output_btd: Tensor, carry: None) -> Hidden:
        return Hidden(state.h + (self.alpha * output_btd).to(state.h.dtype))
