"""The parts of a decoder that do not depend on the mechanism: norm, MLP, positions, embedding and head.

Shapes: b batch, t tokens, d hidden size, f width of the MLP, n heads, e head size, v vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlm.model.shape import Backbone, Size
from depthlm.ops.cross_entropy.chunked import linear_cross_entropy
from depthlm.ops.dropout import HIDDEN, Dropout, apply_dropout
from depthlm.ops.dtypes import compute_dtype, upcast
from depthlm.ops.functions import gated_product, gated_projection, linear, linear_together, rms_norm

Rope = tuple[Tensor, Tensor]


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467) or LayerNorm with bias (arXiv 1607.06450) over the last dimension, computed in fp32.

    Under autocast the result has the autocast dtype, so the projections that share it do not each cast it.
    """

    def __init__(self, width: int, backbone: Backbone):
        super().__init__()
        self.eps = backbone.norm_eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if backbone.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            y = F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        else:
            y = rms_norm(x, self.weight, self.eps)
        return y.to(compute_dtype(x))


class Linear(nn.Linear):
    """x W^T + b, like `nn.Linear`, but faster where one token is decoded on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class ZeroLinear(nn.Linear):
    """A linear layer that is initialized to zero."""

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.zero_()


class GatedLinear(Linear):
    """A linear layer that need not save its input for the backward pass where that is silu(gate) * up.

    A module of its own, since a module has its sharded weights only while it runs.
    """

    def forward(self, x: Tensor, gate: Tensor | None = None, up: Tensor | None = None) -> Tensor:
        if gate is None or up is None:
            return super().forward(x)
        return gated_projection(x, gate, up, self.weight, self.bias)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202) or a two-matrix MLP with ReLU.

    x_btd -> gate_proj -> silu ---(*)-> down_proj -> y_btd        x_btd -> up_proj -> relu -> down_proj -> y_btd
       `---> up_proj ---------------'

    Dropout of the hidden layer, the input of down_proj, is that of `up` where a gate multiplies it.
    """

    def __init__(self, d: int, f: int, backbone: Backbone):
        super().__init__()
        bias, gated = backbone.mlp_bias, backbone.mlp != "relu"
        self.gate_proj = Linear(d, f, bias=bias) if gated else None
        self.up_proj = Linear(d, f, bias=bias)
        self.down_proj = (GatedLinear if gated else Linear)(f, d, bias=bias)

    def forward(self, x_btd: Tensor, dropout: Dropout | None = None) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(apply_dropout(F.relu(self.up_proj(x_btd)), dropout, HIDDEN))
        gate, up = linear_together(x_btd, self.gate_proj, self.up_proj)
        up = apply_dropout(up, dropout, HIDDEN)
        hidden = gated_product(gate, up)
        # a wrapper, such as PEFT's of an adapter, has the interface of nn.Linear
        return self.down_proj(hidden, gate, up) if isinstance(self.down_proj, GatedLinear) else self.down_proj(hidden)


class Embedding(nn.Module):
    """Token embedding, plus sinusoidal positions if the backbone has them.

    It starts with standard deviation size.embedding_init_std. By default that is 1 with sinusoids, whose amplitude is 1
    (Flax's LM1B example), and else that of the matrices.
    """

    def __init__(self, size: Size, backbone: Backbone):
        super().__init__()
        self.sinusoidal = backbone.position == "sinusoidal"
        self.init_std = size.embedding_init_std or (1.0 if self.sinusoidal else None)
        self.weight = nn.Parameter(torch.empty(size.vocab_size, size.hidden_size))

    def forward(self, tokens_bt: Tensor, positions: Tensor) -> Tensor:
        x_btd = F.embedding(tokens_bt, self.weight)
        if self.sinusoidal:
            x_btd = x_btd + sinusoids(positions, x_btd.shape[-1]).to(x_btd.dtype)
        return x_btd


class Head(nn.Module):
    """Hidden states to logits. A tied head owns no matrix and receives the embedding matrix."""

    def __init__(self, size: Size, backbone: Backbone):
        super().__init__()
        tied = backbone.tie_embeddings
        self.weight = None if tied else nn.Parameter(torch.empty(size.vocab_size, size.hidden_size))
        self.bias = nn.Parameter(torch.zeros(size.vocab_size)) if backbone.head_bias else None

    def forward(
        self,
        hidden_btd: Tensor,
        embedding_vd: Tensor | None,
        targets_r: Tensor | None = None,
        fused: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits_btv, or with targets nll_r and logsumexp_r of all r = b * t rows. Targets of -100 are ignored.

        The loss is computed here because a module has its sharded weights only in its own forward and backward pass.
        """
        weight_vd = embedding_vd if self.weight is None else self.weight
        assert weight_vd is not None
        if targets_r is None:
            return linear(hidden_btd, weight_vd, self.bias)
        return linear_cross_entropy(hidden_btd.flatten(0, 1), weight_vd, self.bias, targets_r, fused)


def rope_tables(positions: Tensor, head_size: int, theta: float) -> Rope:
    """Return the tables (cos, cos) and (-sin, sin) in fp32 for `apply_rope`.

    The layout is that of transformers (RoFormer, arXiv 2104.09864).
    positions: [t], or [b, t] if rows differ; the tables have one more dimension, e.
    Every forward pass computes the tables again: a buffer would lose precision when a model is cast to bf16.
    """
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32) / head_size
    angles = positions.float()[..., None] * theta**-exponents
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rope(x_btne: Tensor, rope: Rope) -> Tensor:
    """Rotate the pairs (i, i + e/2) of every head in fp32, and return the dtype of x."""
    cos_t1e, sin_t1e = (table.unsqueeze(-2) for table in rope)
    x = upcast(x_btne)
    return torch.addcmul(x * cos_t1e, x.roll(x.shape[-1] // 2, -1), sin_t1e).to(x_btne.dtype)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Return sinusoidal positions in fp32: sines, then cosines, wavelengths 2 pi to 2 pi * 10 000 (arXiv 1706.03762).

    positions: [t] or [b, t]; the result has one more dimension, of the given width. The layout is that of Flax's LM1B
    example. An odd width ends in a zero.
    """
    half = width // 2
    scales = torch.arange(half, device=positions.device, dtype=torch.float32) / max(half - 1, 1)
    angles = positions.float()[..., None] * 10000.0**-scales
    return F.pad(torch.cat((angles.sin(), angles.cos()), dim=-1), (0, width - 2 * half))
