"""Causal self-attention with grouped queries, and the interface of every attention.

Shapes: b batch, t new tokens, s tokens in the cache and new, d hidden size, h query heads, k key/value heads,
n either of the two, e head size.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from depthlm.model.cache import causal_mask
from depthlm.model.layers import Linear, Norm, Rope, apply_rope
from depthlm.model.shape import Backbone, Size
from depthlm.model.sublayer_spec import SublayerSpec

DepthKV = list[tuple[Tensor, ...]]


class AttentionContext(NamedTuple):
    """What the new tokens see of the sequence.

    mask_b1ts: true where a token sees another of its own document; None: it sees itself and all before it.
    update: puts k_bkte and v_bkte in the cache and gives k_bkse and v_bkse; None when there is no cache.
    """

    mask_b1ts: Tensor | None = None
    update: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def extend(self, k_bkte: Tensor, v_bkte: Tensor) -> tuple[Tensor, Tensor]:
        """k_bkse and v_bkse: those of the cache and the new ones, which it holds from now on."""
        return self.update(k_bkte, v_bkte) if self.update else (k_bkte, v_bkte)


class SelfAttention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) over the tokens of its own layer.

    inputs -> q_proj -> norm -> rope -> q --.
           -> k_proj -> norm -> rope -> k ---> attend -> context -> o_proj -> output_btd
           -> v_proj -----------------> v --'    ^ `-> depth, for the layers above
                                               depth, of the layers below

    A layer calls, in this order, `project` and `output` (matrix products; compiled where compiling is on, so neither
    may touch the depth list), and between them `attend`, where a mechanism does its work. `after_mlp` follows the MLP
    and is given the MLP's input. The depth list holds tuples of tensors of this forward pass, in the order in which
    layers appended them; it is copied, never changed in place.
    """

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__()
        self.spec = spec
        self.num_heads, self.num_kv_heads, self.head_size = size.num_heads, size.num_kv_heads, size.head_size
        self.qk_norm = backbone.qk_norm
        q_width, kv_width = size.num_heads * size.head_size, size.num_kv_heads * size.head_size
        self.q_proj = Linear(size.hidden_size, q_width, bias=backbone.attention_bias)
        self.k_proj = Linear(size.hidden_size, kv_width, bias=backbone.attention_bias)
        self.v_proj = Linear(size.hidden_size, kv_width, bias=backbone.attention_bias)
        self.o_proj = Linear(q_width, size.hidden_size, bias=backbone.attention_bias)
        if self.qk_norm != "none":
            self.q_norm = Norm(size.head_size if self.qk_norm == "head" else q_width, backbone)
            self.k_norm = Norm(size.head_size if self.qk_norm == "head" else kv_width, backbone)

    def project(self, q_in: Tensor, k_in: Tensor, v_in: Tensor, rope: Rope | None) -> tuple[Tensor, ...]:
        """q_bhte, k_bkte, v_bkte, and what else `attend` of a mechanism needs.

        q_in, k_in, v_in: x_btd, normed on a pre-norm backbone; mostly one tensor three times.
        """
        q = self.rotate(self.q_proj(q_in), self.q_norm if self.qk_norm != "none" else None, rope)
        k = self.rotate(self.k_proj(k_in), self.k_norm if self.qk_norm != "none" else None, rope)
        return q, k, self.heads(self.v_proj(v_in)).transpose(1, 2)

    def attend(self, projected: tuple[Tensor, ...], depth: DepthKV, past: AttentionContext) -> tuple[Tensor, DepthKV]:
        """context_bt(he) and the depth list for the layers above."""
        q, k, v = projected
        return causal_attention(q, k, v, past), depth

    def output(self, context: Tensor) -> Tensor:
        """output_btd of context_bt(he)."""
        return self.o_proj(context)

    def after_mlp(self, mlp_input_btd: Tensor, rope: Rope | None, depth: DepthKV) -> DepthKV:
        """The depth list after the MLP of this layer, given what that MLP sees."""
        return depth

    def heads(self, x: Tensor) -> Tensor:
        """x_bt(ne) as x_btne."""
        return x.unflatten(-1, (-1, self.head_size))

    def rotate(self, x: Tensor, norm: Norm | None, rope: Rope | None) -> Tensor:
        """x_bt(ne), normed and rotated, as x_bnte."""
        if norm is not None and self.qk_norm == "full":
            x = norm(x)
        x = self.heads(x)
        if norm is not None and self.qk_norm == "head":
            x = norm(x)
        if rope is not None:
            x = apply_rope(x, rope)
        return x.transpose(1, 2)

    def forward_flops(self, length: int, causal: bool) -> float:
        """FLOPs per token beyond the `nn.Linear` children: scores and weighted sum, half of them when causal."""
        return 4 * self.num_heads * self.head_size * length * (0.5 if causal else 1.0)

    def io_values(self) -> float:
        """Activation values that a depth mechanism reads and writes per token, beyond those of this attention."""
        return 0.0

    def held_values(self) -> float:
        """Values per token that this layer hands to later ones and that the KV cache does not hold."""
        return 0.0


def causal_attention(q_bhte: Tensor, k_bkte: Tensor, v_bkte: Tensor, past: AttentionContext) -> Tensor:
    """context_bt(he) of the new tokens, each attending to itself and to those before it, the cache's included.

    Those of other documents are left out.
    """
    k, v = past.extend(k_bkte, v_bkte)
    t, s, groups = q_bhte.shape[2], k.shape[2], q_bhte.shape[1] // k.shape[1]
    mask, causal = past.mask_b1ts, past.mask_b1ts is None and t == s
    if mask is None and 1 < t < s:
        mask = causal_mask(t, s, q_bhte.device)
    elif mask is not None and q_bhte.is_cuda:
        # the memory-efficient kernel, which takes a mask in every type, knows no groups; without it all scores are held
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    context = F.scaled_dot_product_attention(q_bhte, k, v, attn_mask=mask, is_causal=causal, enable_gqa=groups > 1)
    return context.transpose(1, 2).flatten(2)


class AttentionFactory(Protocol):
    """A class of attentions, with its own settings bound (`functools.partial`)."""

    def __call__(self, spec: SublayerSpec, size: Size, backbone: Backbone) -> SelfAttention: ...
