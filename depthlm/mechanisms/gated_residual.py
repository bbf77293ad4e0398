"""The gated residual connection of Muse Spark (transformers 5.23.0, `MuseSparkResidualGate`).

    h <- alpha * h + beta * f(h),  beta = sigmoid(g / tau) in R^D,  alpha = sqrt(sigmoid(-g / tau) (1 + beta))

so that alpha^2 + beta^2 = 1, and the variance of h does not grow where h and f(h) are independent.

With form=token, a gate for each token instead (PrimeIntellect-ai/prime-rl, deepseek_v41/gated_residual.py):

    h <- h + g f(h),  g = 2 sigmoid(c (w . RMS(h)) + b)

h_btd --+---------> * alpha --(+)-> h_btd
        `-> sublayer f -> * beta -^
"""

import torch
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Hidden, Inputs
from depthlm.model.figures import Figure
from depthlm.model.settings import check, number, one_of
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.dtypes import upcast
from depthlm.ops.functions import rms_norm

# the least alpha^2, as in that class
MIN_ALPHA_SQUARED = 1e-3


class GatedResidual(Connection):
    """A residual connection with gates.

    form: channel: one per channel between the two terms; token: one per token of the output, with w = 0, b = 0 and
        c = 1 at first, so that the decoder initially equals vanilla.
    temperature: tau.
    """

    colour = "#6A3D9A"
    is_compiled = True
    why_undefined = "its gates keep the variance of a read, which is neither a sum nor a mean of outputs"

    def __init__(
        self, spec: SublayerSpec, size: Size, backbone: Backbone, form: str = "channel", temperature: float = 0.3
    ):
        super().__init__(spec, size, backbone)
        check(one_of(("channel", "token"), form=form), number(1e-6, temperature=temperature))
        self.temperature, self.eps = temperature, backbone.norm_eps
        self.is_gated = spec.kind != "final"
        self.of_token = form == "token"
        if self.of_token:
            self.identity_start, self.accumulates, self.width_exponents = "", "sum", {"w": 1.0}
        if self.is_gated and self.of_token:
            self.w = nn.Parameter(torch.empty(size.hidden_size))
            self.c, self.b = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
            # h is read once more
            self.cost = Cost(3.0 * size.hidden_size, 1.0 * size.hidden_size)
        elif self.is_gated:
            self.gate = nn.Parameter(torch.empty(size.hidden_size))
            self.cost = Cost(flops=2.0 * size.hidden_size)
        self.fp32_parameters = tuple(self._parameters)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        if name == "gate":
            tensor.normal_(0, std, generator=generator)
        else:
            tensor.fill_(1.0 if name == "c" else 0.0)

    def read(self, state: Hidden, weights: Tensor | None = None) -> tuple[Inputs, Tensor | None]:
        return (state.h,), self.weights(state) if weights is None else weights

    def weights(self, state: Hidden) -> Tensor | None:
        """Return g_bt1 of form=token."""
        if not (self.is_gated and self.of_token):
            return None
        along_bt1 = (upcast(rms_norm(state.h, None, self.eps)) * self.w).sum(-1, keepdim=True)
        return 2 * (self.c * along_bt1 + self.b).sigmoid()

    def write(self, state: Hidden, output_btd: Tensor, carry: Tensor | None) -> Hidden:
        if carry is not None:
            return Hidden((state.h + carry * output_btd).to(state.h.dtype))
        alpha_d, beta_d = self.factors()
        return Hidden((alpha_d * state.h + beta_d * output_btd).to(state.h.dtype))

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return alpha_d and beta_d."""
        gate_d = self.gate / self.temperature
        beta_d = gate_d.sigmoid()
        return ((-gate_d).sigmoid() * (1 + beta_d)).clamp(min=MIN_ALPHA_SQUARED).sqrt(), beta_d

    def figures(self, state: Hidden) -> list[Figure]:
        if not self.is_gated:
            return []
        weights = self.weights(state)
        if weights is not None:
            return [
                Figure("token", weights[..., 0], ("batch", "token"), "the gate of each sublayer's output", after=True)
            ]
        about, panels = "the gates of each sublayer", ("alpha, of the skip", "beta, of the output")
        factors_pd = torch.stack(self.factors())
        return [Figure("gate", factors_pd, ("panel", "hidden"), about, panels=panels, after=True)]
