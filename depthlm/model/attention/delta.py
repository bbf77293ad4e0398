"""Kimi Delta Attention as the mixer of a layer: a state of fixed size in place of keys and values.

Shapes: b batch, t new tokens, d hidden size, h heads, e head size, c = h * e channels, 3 the tokens before, 4 taps.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlm.model.attention.context import AttentionContext
from depthlm.model.attention.self_attention import DepthKV
from depthlm.model.layers import Linear, Rope
from depthlm.model.shape import Backbone, Size
from depthlm.ops.dtypes import upcast
from depthlm.ops.functions import linear_together
from depthlm.ops.kimi_delta.attention import delta_attention, gated_rms_norm, l2_norm, short_convolution

TAPS = 4


class DeltaAttention(nn.Module):
    """Kimi Delta Attention (arXiv 2510.26692, section 4), with the methods of `SelfAttention` that a layer calls.

    inputs -> q_proj -> convolution -> L2 norm -> q --.
           -> k_proj -> convolution -> L2 norm -> k ---> delta rule -> gated norm -> o_proj -> output_btd
           -> v_proj -> convolution ------------> v --|     ^  |           ^
           -> f_a_proj -> f_b_proj -> decay g --------|     state          |
           -> b_proj -> sigmoid -> step size beta ----'                    |
           -> g_a_proj -> g_b_proj -> output gate -------------------------'

    The decay of a channel is exp(g) with g = -exp(A_log) softplus(f + dt_bias). It has no keys and values that later
    layers could read, so it passes the depth list on. Its queries and output gate are projected from q_in, its values
    from v_in, all else from k_in.
    """

    fp32_parameters = ("A_log", "dt_bias")

    def __init__(self, size: Size, backbone: Backbone):
        super().__init__()
        d, e, c = size.hidden_size, size.head_size, size.num_heads * size.head_size
        self.num_heads = size.num_heads
        self.head_size = e
        self.q_proj = Linear(d, c, bias=False)
        self.k_proj = Linear(d, c, bias=False)
        self.v_proj = Linear(d, c, bias=False)
        self.q_conv1d = ShortConvolution(c)
        self.k_conv1d = ShortConvolution(c)
        self.v_conv1d = ShortConvolution(c)
        self.f_a_proj = Linear(d, e, bias=False)
        self.f_b_proj = Linear(e, c, bias=False)
        self.A_log = nn.Parameter(torch.empty(size.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(c))
        self.b_proj = Linear(d, size.num_heads, bias=False)
        self.g_a_proj = Linear(d, e, bias=False)
        self.g_b_proj = Linear(e, c, bias=False)
        self.o_norm = GatedNorm(e, backbone.norm_eps)
        self.o_proj = Linear(c, d, bias=False)

    def project(self, q_in: Tensor, k_in: Tensor, v_in: Tensor, rope: Rope | None) -> tuple[Tensor, ...]:
        """Return q_btc, k_btc, v_btc before their convolutions, g_bthe, beta_bth and gate_bthe. rope is not used."""
        layers = self.q_proj, self.g_a_proj, self.k_proj, self.f_a_proj, self.b_proj, self.v_proj
        if q_in is k_in is v_in:
            q, gate, k, f, beta, v = linear_together(q_in, *layers)
        else:
            inputs = q_in, q_in, k_in, k_in, k_in, v_in
            q, gate, k, f, beta, v = (layer(x) for layer, x in zip(layers, inputs, strict=True))
        f = upcast(self.f_b_proj(f)) + upcast(self.dt_bias)
        g = -upcast(self.A_log).exp()[:, None] * self.heads(F.softplus(f))
        return q, k, v, g, upcast(beta).sigmoid(), self.heads(self.g_b_proj(gate))

    def attend(
        self, projected: tuple[Tensor, ...], depth: DepthKV, context: AttentionContext
    ) -> tuple[tuple[Tensor, Tensor], DepthKV]:
        """Return the argument of `output`, and the depth list unchanged."""
        *inputs, g, beta, gate = projected
        starts_bt = None if context.documents is None else context.documents.starts_bt
        *tails, state = context.state() or (None,) * 4
        convolutions = self.q_conv1d, self.k_conv1d, self.v_conv1d
        outputs = [
            convolution(x, tail, starts_bt) for convolution, x, tail in zip(convolutions, inputs, tails, strict=True)
        ]
        q, k, v = (self.heads(x) for x, _ in outputs)
        o_bthe, state = delta_attention(l2_norm(q), l2_norm(k), v, g, beta, state, starts_bt)
        if context.cache is not None:
            # a view would keep the inputs of all tokens
            context.set_state((*(tail.clone() for _, tail in outputs), state))
        return (o_bthe, gate), depth

    def output(self, attended: tuple[Tensor, Tensor]) -> Tensor:
        """Return output_btd."""
        return self.o_proj(self.o_norm(*attended).flatten(2))

    def project_mlp(self, mlp_input_btd: Tensor, rope: Rope | None) -> tuple[Tensor, ...]:
        """Return nothing: it adds no depth entry."""
        return ()

    def after_mlp(self, projected: tuple[Tensor, ...], depth: DepthKV) -> DepthKV:
        """Return the depth list unchanged."""
        return depth

    def heads(self, x: Tensor) -> Tensor:
        """Split x_btc into heads, x_bthe."""
        return x.unflatten(-1, (-1, self.head_size))

    def forward_flops(self, length: float, causal: bool) -> float:
        """Return the FLOPs per token beyond the `nn.Linear` children: the recurrence and the convolutions.

        The recurrence takes three products of e x e values per head: it reads the state at the key, writes to it, and
        reads it at the query. Chunks take more, but a model's FLOPs do not depend on how they are computed.
        """
        return 6.0 * self.num_heads * self.head_size**2 + 3 * 2.0 * TAPS * self.num_heads * self.head_size

    def io_values(self) -> float:
        """Return 0: no depth mechanism reads or writes here."""
        return 0.0

    def held_values(self) -> float:
        """Return 0: nothing is held for later layers."""
        return 0.0

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        """As in fla-core: exp(A_log) is uniform in [1, 16], softplus(dt_bias) is log-uniform in [0.001, 0.1]."""
        if name == "A_log":
            tensor.uniform_(1, 16, generator=generator).log_()
        else:
            step = tensor.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
            # the inverse of softplus
            tensor.copy_(step + torch.log(-torch.expm1(-step)))


class ShortConvolution(nn.Module):
    """A causal convolution of each channel over 4 tokens, and SiLU. It starts uniform, like `nn.Conv1d`."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, TAPS))

    def forward(self, x_btc: Tensor, tail_b3c: Tensor | None, starts_bt: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return y_btc and the last inputs, as `short_convolution` describes."""
        return short_convolution(x_btc, self.weight, tail_b3c, starts_bt)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        bound = TAPS**-0.5
        tensor.uniform_(-bound, bound, generator=generator)


class GatedNorm(nn.Module):
    """RMSNorm over each head, times the sigmoid of a gate."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_bthe: Tensor, gate_bthe: Tensor) -> Tensor:
        return gated_rms_norm(x_bthe, gate_bthe, self.weight, self.eps)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.fill_(1.0)
