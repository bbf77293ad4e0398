"""The gated residual connection of Muse Spark (transformers 5.23.0, `MuseSparkResidualGate`).

    h <- alpha * h + beta * f(h),  beta = sigmoid(g / tau) in R^D,  alpha = sqrt(sigmoid(-g / tau) (1 + beta))

so that alpha^2 + beta^2 = 1, and the variance of h does not grow where h and f(h) are independent.

h_btd --+---------> * alpha --(+)-> h_btd
        `-> sublayer f -> * beta -^
"""

import torch
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Hidden, Inputs
from depthlm.model.figures import Figure
from depthlm.model.settings import check, number
from depthlm.model.shape import Backbone, Size, SublayerSpec

# the least alpha^2, as in that class
MIN_ALPHA_SQUARED = 1e-3


class GatedResidual(Connection):
    """A residual connection with a gate per channel between its two terms.

    temperature: tau.
    """

    colour = "#6A3D9A"
    is_compiled = True
    why_undefined = "its gates keep the variance of a read, which is neither a sum nor a mean of outputs"

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone, temperature: float = 0.3):
        super().__init__(spec, size, backbone)
        check(number(1e-6, temperature=temperature))
        self.temperature = temperature
        if spec.kind != "final":
            self.gate = nn.Parameter(torch.empty(size.hidden_size))
            self.fp32_parameters = ("gate",)
            self.cost = Cost(flops=2.0 * size.hidden_size)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.normal_(0, std, generator=generator)

    def read(self, state: Hidden, weights: None = None) -> tuple[Inputs, None]:
        return (state.h,), None

    def write(self, state: Hidden, output_btd: Tensor, carry: None) -> Hidden:
        alpha_d, beta_d = self.factors()
        return Hidden((alpha_d * state.h + beta_d * output_btd).to(state.h.dtype))

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return alpha_d and beta_d."""
        gate_d = self.gate / self.temperature
        beta_d = gate_d.sigmoid()
        return ((-gate_d).sigmoid() * (1 + beta_d)).clamp(min=MIN_ALPHA_SQUARED).sqrt(), beta_d

    def figures(self, state: Hidden) -> list[Figure]:
        if self.spec.kind == "final":
            return []
        about, panels = "the gates of each sublayer", ("alpha, of the skip", "beta, of the output")
        factors_pd = torch.stack(self.factors())
        return [Figure("gate", factors_pd, ("panel", "hidden"), about, panels=panels, after=True)]
