"""Attention over the sequence and over depth in one softmax: an exact merge of a flash attention and a depth part.

Flash attention returns a context o and the log-sum-exp l of its scores. `moda_depth` computes o' and l' of the softmax
over both parts. The backward pass of flash attention depends on the softmax only through the output and the
log-sum-exp. So with o' and l' it returns the gradients of the sequence part. No attention kernel is needed here, and
any number of queries per key/value head works.

Shapes: b batch, t new tokens, s cached and new tokens, h query heads, k key/value heads, g queries per
key/value head, e head size.
"""

from typing import Any

import torch
from torch import Tensor

from depthlm.ops.backend import chosen, using
from depthlm.ops.call import call
from depthlm.ops.flash import Bounds, gpu_flash
from depthlm.ops.flash import backward as backward_by_document
from depthlm.ops.flash import forward as forward_by_document
from depthlm.ops.moda.bank import Bank, Depth
from depthlm.ops.moda.cpu import moda_depth, moda_depth_backward
from depthlm.ops.moda.naive import attend_with_scores


def merged_attention(
    q_bhte: Tensor,
    k_bkse: Tensor,
    v_bkse: Tensor,
    depth: Depth,
    mask_b1ts: Tensor | None = None,
    bounds: Bounds | None = None,
) -> Tensor:
    """Return context_bhte of the last t of s tokens.

    Each token attends to itself and to all tokens before it, and to the depth entries at its own position.
    depth: at least one entry. mask_b1ts: replaces the causal mask; each token must attend to at least one token.
    bounds: limit attention to documents on a GPU, where `takes_documents` holds, without a mask and cached tokens.
    """
    if bounds is not None:
        return attend_with_flash(q_bhte, k_bkse, v_bkse, depth, bounds=bounds)
    is_fast = has_flash(q_bhte, k_bkse, mask_b1ts) and chosen() != "naive"
    attend = attend_with_flash if is_fast else attend_with_scores
    return attend(q_bhte, k_bkse, v_bkse, depth, mask_b1ts)


def attend_with_flash(
    q_bhte: Tensor,
    k_bkse: Tensor,
    v_bkse: Tensor,
    depth: Depth,
    mask_b1ts: Tensor | None = None,
    bounds: Bounds | None = None,
) -> Tensor:
    """Return context_bhte from a flash attention and a depth part."""
    read = depth.entries_n2btke, depth.token, depth.bank, depth.start
    return call(DepthMerge, q_bhte, k_bkse, v_bkse, mask_b1ts, bounds, *read)


def has_flash(q_bhte: Tensor, k_bkse: Tensor, mask_b1ts: Tensor | None) -> bool:
    """Return whether flash attention supports these tensors. On a GPU its only mask is the square causal one."""
    if mask_b1ts is not None:
        return q_bhte.is_cpu
    return (q_bhte.is_cpu or gpu_flash(q_bhte)) and q_bhte.shape[2] in (1, k_bkse.shape[2])


class DepthMerge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_bhte: Tensor,
        k_bkse: Tensor,
        v_bkse: Tensor,
        mask_b1ts: Tensor | None,
        bounds: Bounds | None,
        entries_n2btke: Tensor,
        token: Tensor | None,
        bank: Bank,
        start: int,
    ) -> Tensor:
        out_bhte, lse_bht, *ctx.rest = _flash(q_bhte, k_bkse, v_bkse, mask_b1ts, bounds)
        context_bhte, merged_bht = moda_depth(q_bhte, out_bhte, lse_bht, entries_n2btke)
        ctx.save_for_backward(q_bhte, k_bkse, v_bkse, mask_b1ts, context_bhte, merged_bht, bank.entries_n2btke)
        # the context must not hold the bank: a graph that lives on after its backward pass would keep the entries
        ctx.sums, ctx.range = bank.sums, (start, start + len(entries_n2btke))
        ctx.kernels, ctx.bounds = chosen(), bounds
        return context_bhte

    @staticmethod
    def backward(ctx: Any, grad_bhte: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, context, merged_bht, bank_n2btke = ctx.saved_tensors
        grad_q, grad_k, grad_v = _flash_backward(grad_bhte, q, k, v, mask, context, merged_bht, ctx.bounds, ctx.rest)
        entries, (sums, fresh) = bank_n2btke[slice(*ctx.range)], ctx.sums.reserve(bank_n2btke, *ctx.range)
        with using(ctx.kernels):
            grad_q = moda_depth_backward(grad_bhte, q, context, merged_bht, grad_q, entries, sums, fresh)
        return grad_q, grad_k, grad_v, None, None, None, None, None, None


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bounds: Bounds | None) -> Any:
    if bounds is not None:
        return forward_by_document(q, k, v, bounds)
    causal, aten = mask is None and q.shape[2] == k.shape[2], torch.ops.aten
    if q.is_cpu:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=_added(mask, q))
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor,
    bounds: Bounds | None, rest: Any,
) -> Any:  # fmt: skip
    if bounds is not None:
        return backward_by_document(grad, q, k, v, out, lse, bounds, rest)
    causal, aten = mask is None and q.shape[2] == k.shape[2], torch.ops.aten
    if q.is_cpu:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=_added(mask, q)
        )
    # the forward pass returned lengths, random state and a debug mask
    *lengths, seed, offset, _ = rest
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, causal, seed, offset
    )


def _added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the mask as an additive one, since the operator does not take a boolean mask."""
    return None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
