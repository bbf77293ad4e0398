"""Attention over the sequence and over depth in one softmax: a stock flash attention and a depth part, merged exactly.

Flash attention gives a context o and the log-sum-exp l of its scores, and `moda_depth` makes of them those of the
softmax over both, o' and l'. Flash attention's own backward, given o' and l', yields the gradients of the sequence
part, since it knows the softmax only through them; so no attention kernel is written here, and any grouping works.

Shapes: b batch, t new tokens, s tokens in the cache and new, h query heads, k key/value heads, g queries of one of
them, e head size.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from depthlm.kernels.backend import chosen, gpu_capability, using
from depthlm.kernels.call import call
from depthlm.kernels.dtypes import upcast
from depthlm.kernels.moda.reference import moda_depth, moda_depth_backward


def merged_attention(
    q_bhte: Tensor,
    k_bkse: Tensor,
    v_bkse: Tensor,
    depth: Sequence[Sequence[Tensor]],
    mask_b1ts: Tensor | None = None,
) -> Tensor:
    """context_bhte of the t last of s tokens, each attending to those up to itself, and at its own position to depth.

    depth: one pair (k_bkte, v_bkte) or more. mask_b1ts: which tokens a token sees instead, at least one of them.
    """
    attend = partial(call, DepthMerge) if has_flash(q_bhte, k_bkse, mask_b1ts) else attend_with_scores
    return attend(q_bhte, k_bkse, v_bkse, mask_b1ts, *(tensor for pair in depth for tensor in pair))


def has_flash(q_bhte: Tensor, k_bkse: Tensor, mask_b1ts: Tensor | None) -> bool:
    """Whether this machine's flash attention takes these tensors: on a GPU its one mask is the causal square."""
    if mask_b1ts is not None:
        return q_bhte.is_cpu
    fits = q_bhte.is_cpu
    if q_bhte.is_cuda:
        ampere = gpu_capability() >= (8, 0)
        fits = ampere and q_bhte.itemsize == 2 and q_bhte.shape[3] % 8 == 0 and q_bhte.shape[3] <= 256
    return fits and q_bhte.shape[2] in (1, k_bkse.shape[2])


def attend_with_scores(
    q_bhte: Tensor, k_bkse: Tensor, v_bkse: Tensor, mask_b1ts: Tensor | None, *depth: Tensor
) -> Tensor:
    """context_bhte, from one row of scores per query: what `DepthMerge` must equal, and the way without flash."""
    s, groups = k_bkse.shape[2], q_bhte.shape[1] // k_bkse.shape[1]
    p = probabilities(q_bhte, k_bkse, depth[::2], mask_b1ts)
    context = p[..., :s] @ _repeated(v_bkse, groups)
    for j, value in enumerate(depth[1::2]):
        context = torch.addcmul(context, p[..., s + j, None], _repeated(value, groups))
    return context.to(q_bhte.dtype)


def probabilities(
    q_bhte: Tensor, k_bkse: Tensor, depth_keys: Sequence[Tensor], mask_b1ts: Tensor | None = None
) -> Tensor:
    """The one softmax over the sequence and over depth, p_bhtx with x the s tokens and then the n entries k_bkte."""
    t, s, groups = q_bhte.shape[2], k_bkse.shape[2], q_bhte.shape[1] // k_bkse.shape[1]
    q = upcast(q_bhte) * q_bhte.shape[3] ** -0.5
    seen = torch.ones(t, s, dtype=torch.bool, device=q_bhte.device).tril(s - t) if mask_b1ts is None else mask_b1ts
    scores = (q @ _repeated(k_bkse, groups).mT).masked_fill(~seen, -torch.inf)
    depth_scores = [(q * _repeated(key, groups)).sum(-1, keepdim=True) for key in depth_keys]
    return torch.cat([scores, *depth_scores], dim=-1).softmax(-1)


class DepthMerge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_bhte: Tensor, k_bkse: Tensor, v_bkse: Tensor, mask_b1ts: Tensor | None, *depth: Tensor
    ) -> Tensor:
        out_bhte, lse_bht, *ctx.rest = _flash(q_bhte, k_bkse, v_bkse, mask_b1ts)
        context_bhte, merged_bht = moda_depth(q_bhte, out_bhte, lse_bht, depth[::2], depth[1::2])
        ctx.save_for_backward(q_bhte, k_bkse, v_bkse, mask_b1ts, context_bhte, merged_bht, *depth)
        ctx.kernels = chosen()
        return context_bhte

    @staticmethod
    def backward(ctx: Any, grad_bhte: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, context, merged_bht, *depth = ctx.saved_tensors
        grad_q, grad_k, grad_v = _flash_backward(grad_bhte, q, k, v, mask, context, merged_bht, ctx.rest)
        with using(ctx.kernels):
            grad_depth_q, *grads = moda_depth_backward(grad_bhte, q, context, merged_bht, depth[::2], depth[1::2])
        pairs = zip(*grads, strict=True)
        return grad_depth_q.add_(grad_q).to(q.dtype), grad_k, grad_v, None, *(grad for pair in pairs for grad in pair)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
    causal, aten = mask is None and q.shape[2] == k.shape[2], torch.ops.aten
    if q.is_cpu:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=_added(mask, q))
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, rest: Any
) -> Any:
    causal, aten = mask is None and q.shape[2] == k.shape[2], torch.ops.aten
    if q.is_cpu:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=_added(mask, q)
        )
    # the lengths and the random state that its forward returned; the last of `rest` is a debugging mask
    *lengths, seed, offset, _ = rest
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, causal, seed, offset
    )


def _added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask as what is added to scores: the operator itself takes no truth values."""
    return None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)


def _repeated(x_bkse: Tensor, groups: int) -> Tensor:
    """x_bhse in fp32 or better: each key or value of a head for each of its queries."""
    return upcast(x_bkse).repeat_interleave(groups, 1)
