"""Causal self-attention with grouped queries. Every other attention derives from it.

Shapes: b batch, t new tokens, s cached and new tokens, d hidden size, h query heads, k key/value heads,
n either of the two, e head size.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlm.model.attention.context import AttentionContext, causal_mask
from depthlm.model.edges import Edit, Reader, describe_axes
from depthlm.model.layers import Linear, Norm, Rope, apply_rope
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.dropout import ATTENTION_WEIGHTS, apply_dropout
from depthlm.ops.dtypes import upcast
from depthlm.ops.flash import attend_by_document
from depthlm.ops.functions import are_linear, linear, linear_together

DepthKV = Sequence[tuple[Tensor, ...]]
# of the norm of the latent, in DeepSeek-V2 and in Kimi Linear, whose other norms have 1e-5
LATENT_EPS = 1e-6


class SelfAttention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) over the sequence, or latent attention (`add_projections`).

        inputs -> q_proj -> norm -> rope -> q --.
               -> k_proj -> norm -> rope -> k ---> attend -> attended -> o_proj -> output_btd
               -> v_proj -----------------> v --'    ^ `-> depth list for later layers
                                                   depth list from earlier layers

    A layer calls `project`, `attend` and `output`, in this order, and `project_mlp` and `after_mlp` after the MLP.
    `project`, `output` and `project_mlp` are matrix products. torch.compile may compile them, so they must not use the
    depth list. A depth mechanism overrides `attend`. The depth list is a sequence of tuples of tensors of this forward
    pass, in the order in which the layers appended them. No method changes it in place: return a new one.

    head_size: of a value.
    key_size: of a query and a key, which are wider in latent attention.
    separate_inputs: whether the connection passes different tensors for q, k and v; the layer sets it.
    projects_kv: whether it has keys and values of its own; if not, it gets only the input of q.
    has_dropout: whether `attend` applies the dropout of its context to the attention weights, as `attend_to` does.
    identity_start: as in `Connection`.
    edit: as in `Connection`.
    """

    projects_kv = True
    has_dropout = True
    identity_start: str | None = ""
    edit: Edit | None = None

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__()
        self.spec, self.layers_of_loop = spec, size.num_layers
        self.num_heads = size.num_heads
        self.num_kv_heads = size.num_kv_heads
        self.head_size = size.head_size
        self.key_size = size.head_size
        self.qk_norm = backbone.qk_norm
        self.is_latent = spec.mixer == "latent"
        self.separate_inputs = False
        self.latent_size = size.width_of_latent() if self.is_latent else 0
        q_width, kv_width = size.num_heads * size.head_size, size.num_kv_heads * size.head_size
        bias = backbone.attention_bias and not self.is_latent
        if self.is_latent:
            self.num_kv_heads = size.num_heads
            self.key_size = size.head_size + size.width_of_shared_key()
            self.qk_norm = "none"
            add_projections(self, size, backbone)
        else:
            self.q_proj = Linear(size.hidden_size, q_width, bias)
            self.k_proj = Linear(size.hidden_size, kv_width, bias)
            self.v_proj = Linear(size.hidden_size, kv_width, bias)
        self.o_proj = Linear(q_width, size.hidden_size, bias)
        if self.qk_norm != "none":
            self.q_norm = Norm(size.head_size if self.qk_norm == "head" else q_width, backbone)
            self.k_norm = Norm(size.head_size if self.qk_norm == "head" else kv_width, backbone)

    def open_depth(self) -> DepthKV:
        """Return the depth list before layer 0. A decoder calls this method of its first attention in each pass."""
        return []

    def resume_depth(self, entries: DepthKV, loop: int) -> DepthKV:
        """Return the depth list before this layer, in a loop from 0, of its entries. A pipeline calls it.

        Tensors that `retained` did not return are None.
        """
        return entries

    def project(self, q_in: Tensor, k_in: Tensor, v_in: Tensor, rope: Rope | None) -> tuple[Tensor, ...]:
        """Return q_bhte, k_bkte, v_bkte, and any further tensors that `attend` of a subclass needs.

        q_in, k_in, v_in: x_btd, normalized on a pre-norm backbone. Most connections pass the same tensor three times.
        """
        if self.is_latent:
            return project_latent(self, q_in, k_in, v_in)
        if q_in is k_in is v_in:
            q, k, v = linear_together(q_in, self.q_proj, self.k_proj, self.v_proj)
        else:
            q, k, v = self.q_proj(q_in), self.k_proj(k_in), self.v_proj(v_in)
        q = self.rotate(q, self.q_norm if self.qk_norm != "none" else None, rope)
        k = self.rotate(k, self.k_norm if self.qk_norm != "none" else None, rope)
        return q, k, self.heads(v).transpose(1, 2)

    def attend(
        self, projected: tuple[Tensor, ...], depth: DepthKV, context: AttentionContext
    ) -> tuple[Tensor, DepthKV]:
        """Return attended_bt(he) and the depth list for later layers."""
        q, k, v = projected
        return causal_attention(q, k, v, context), depth

    def edited(
        self,
        weights: Tensor,
        axes: tuple[str, ...],
        context: AttentionContext,
        sources: Sequence[int],
        normalized: bool,
    ) -> Tensor:
        """Return the weights of keys and values of several layers that `attend` uses, as `Connection.edited` does."""
        if self.edit is None:
            return weights
        return self.edit(Reader("layer", context.slot), weights, describe_axes(weights, axes, sources, normalized))

    def unrolled(self, layer: int, context: AttentionContext) -> int:
        """Return the place of a layer of the context's loop among those of all loops with keys and values."""
        return context.slot // self.layers_of_loop * self.spec.num_layers + layer

    def output(self, attended: Tensor) -> Tensor:
        """Project attended_bt(he) to output_btd."""
        return self.o_proj(attended)

    def project_mlp(self, mlp_input_btd: Tensor, rope: Rope | None) -> tuple[Tensor, ...]:
        """Return any tensors that `after_mlp` of a subclass needs. mlp_input_btd is the input of this layer's MLP."""
        return ()

    def after_mlp(self, projected: tuple[Tensor, ...], depth: DepthKV) -> DepthKV:
        """Return the depth list after the MLP of this layer. projected is the result of `project_mlp`."""
        return depth

    def heads(self, x: Tensor) -> Tensor:
        """Split x_bt(ne) into heads, x_btne."""
        return x.unflatten(-1, (-1, self.head_size))

    def rotate(self, x: Tensor, norm: Norm | None, rope: Rope | None) -> Tensor:
        """Apply QK-norm and RoPE to x_bt(ne), and return x_bnte."""
        if norm is not None and self.qk_norm == "full":
            x = norm(x)
        x = self.heads(x)
        if norm is not None and self.qk_norm == "head":
            x = norm(x)
        if rope is not None:
            x = apply_rope(x, rope)
        return x.transpose(1, 2)

    def retained(self, depth: DepthKV) -> list[Tensor]:
        """Return the tensors of the depth list before this layer that it or a later layer reads.

        A pipeline sends them to the stage that begins with this layer. By default these are all tensors of the list.
        """
        return [x for entry in depth for x in entry]

    def forward_flops(self, length: float, causal: bool) -> float:
        """Return the FLOPs per token beyond the `nn.Linear` children: scores and weighted sum, halved when causal.

        With inputs of their own, keys and values also have latents of their own.
        """
        second = self.latent_size if self.separate_inputs else 0
        scores = 2 * self.num_heads * (self.key_size + self.head_size) * length * (0.5 if causal else 1.0)
        return scores + 2.0 * self.o_proj.out_features * second

    def io_values(self) -> float:
        """Return the activation values per token that a depth mechanism reads and writes beyond this attention."""
        return 0.0

    def cache_values(self) -> float:
        """Return the values per token that this layer adds to the KV cache."""
        return float(self.num_kv_heads * (self.key_size + self.head_size))

    def held_values(self) -> float:
        """Return the values per token that this layer passes to later layers and that are not in the KV cache."""
        return 0.0


def causal_attention(q_bhte: Tensor, k_bkte: Tensor, v_bkte: Tensor, context: AttentionContext) -> Tensor:
    """Return attended_bt(he) of the new tokens.

    Each token attends to itself and to all tokens before it in its document, including those in the cache.
    """
    return attend_to(q_bhte, *context.extend(k_bkte, v_bkte), context)


def attend_to(q_bhte: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
    """Return attended_bt(he) of the new tokens. k, v: of cached and new tokens, x_bkse."""
    # flash attention needs values as wide as the keys; the cache does not
    narrower, bounds = q_bhte.shape[-1] - v.shape[-1], context.bounds(q_bhte)
    if narrower:
        v = F.pad(v, (0, narrower))
    if bounds:
        attended = attend_by_document(q_bhte, k, v, bounds)
    elif context.dropout is not None:
        attended = _attend_with_dropout(q_bhte, k, v, context)
    else:
        attended = _attend(q_bhte, k, v, context.mask_b1ts)
    return (attended[..., :-narrower] if narrower else attended).transpose(1, 2).flatten(2)


def _attend(q_bhte: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    t, s, groups = q_bhte.shape[2], k.shape[2], q_bhte.shape[1] // k.shape[1]
    causal = mask is None and t == s
    if mask is None and 1 < t < s:
        mask = causal_mask(t, s, q_bhte.device)
    if groups > 1 and q_bhte.is_cuda and (mask is not None or q_bhte.dtype == torch.float32):
        # only the memory-efficient kernel takes fp32, or a mask in every dtype, but not grouped queries; the fallback
        # would materialize all scores
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    return F.scaled_dot_product_attention(q_bhte, k, v, attn_mask=mask, is_causal=causal, enable_gqa=groups > 1)


def _attend_with_dropout(q_bhte: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
    """Return attended_bhte with dropout of the attention weights. SDPA's own would depend on the micro-batch."""
    t, s, groups = q_bhte.shape[2], k.shape[2], q_bhte.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    mask = context.mask_b1ts
    if mask is None:
        mask = causal_mask(t, s, q_bhte.device)
    # the factor comes first, since products may overflow in fp16
    scores_bhts = upcast((q_bhte * q_bhte.shape[-1] ** -0.5) @ k.mT)
    weights_bhts = scores_bhts.masked_fill(~mask, -torch.inf).softmax(-1)
    return apply_dropout(weights_bhts, context.dropout, ATTENTION_WEIGHTS).to(v.dtype) @ v


class AttentionFactory(Protocol):
    """An attention class whose own settings are bound with `functools.partial`."""

    def __call__(self, spec: SublayerSpec, size: Size, backbone: Backbone) -> SelfAttention: ...


def add_projections(module: nn.Module, size: Size, backbone: Backbone) -> None:
    """Give a latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), without positions, its projections.

    Each head has keys and values of its own. s: the width of the shared part of the keys; r: that of the latent.

    x -> q_proj -----------------------------------------> q_bht(e+s)
      -> kv_a_proj --> latent_btr -> kv_a_norm -> kv_b_proj -> key_bhte, v_bhte
                  `--> shared_bts, the same for all heads ------------> k = (key, shared)
    """
    h, e, r = size.num_heads, size.head_size, size.width_of_latent()
    module.q_proj = Linear(size.hidden_size, h * (e + size.width_of_shared_key()), bias=False)
    module.kv_a_proj = Linear(size.hidden_size, r + size.width_of_shared_key(), bias=False)
    module.kv_a_norm = Norm(r, replace(backbone, norm="rmsnorm", norm_eps=LATENT_EPS))
    module.kv_b_proj = Linear(r, 2 * h * e, bias=False)


def project_latent(attention: Any, q_in: Tensor, k_in: Tensor, v_in: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q_bht(e+s), k_bht(e+s) and v_bhte. If keys and values have inputs of their own, so do their latents."""
    q_proj, kv_a_proj, kv_b_proj = attention.q_proj, attention.kv_a_proj, attention.kv_b_proj
    kv_a_norm = attention.kv_a_norm
    h, r = attention.num_heads, kv_b_proj.in_features
    if q_in is k_in:
        q, latent_and_shared = linear_together(q_in, q_proj, kv_a_proj)
    else:
        q, latent_and_shared = q_proj(q_in), kv_a_proj(k_in)
    latent_btr, shared_bts = latent_and_shared[..., :r], latent_and_shared[..., r:]
    if k_in is v_in:
        key, v = kv_b_proj(kv_a_norm(latent_btr)).unflatten(-1, (h, -1)).chunk(2, dim=-1)
    elif not are_linear(kv_a_proj, kv_b_proj):
        latents = latent_btr, kv_a_proj(v_in)[..., :r]
        of_key, of_value = (kv_b_proj(kv_a_norm(x)).unflatten(-1, (h, -1)).chunk(2, dim=-1) for x in latents)
        key, v = of_key[0], of_value[1]
    else:
        weights = kv_b_proj.weight.unflatten(0, (h, -1)).chunk(2, dim=1)
        latents = kv_a_norm(latent_btr), kv_a_norm(linear(v_in, kv_a_proj.weight[:r]))
        key, v = (
            linear(x, weight.flatten(0, 1)).unflatten(-1, (h, -1)) for x, weight in zip(latents, weights, strict=True)
        )
    k = torch.cat((key, shared_bts.unsqueeze(2).expand(-1, -1, h, -1)), dim=-1)
    return q.unflatten(-1, (h, -1)).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
