"""Attention over the sequence and over depth in one softmax: an exact merge of a flash attention and a depth part.

Flash attention returns the attended values o and the log-sum-exp l of its scores. With the depth scores
s_j = q . k_j / sqrt(e), the softmax over both parts has

    l' = log(exp l + sum_j exp s_j);    o' = exp(l - l') o + sum_j exp(s_j - l') v_j.

The backward pass of flash attention depends on the softmax only through the output and the log-sum-exp. So with o' and
l' it returns the gradients of the sequence part. With the gradient g of o' and p_j = exp(s_j - l'), that of a score is
p_j (g . v_j - g . o'). All entries are in one tensor, and so are the sums of their gradients (`depthlm.ops.moda.bank`).

On a CPU it is 1.9 times as fast as `attend_with_scores` (benchmarks/kernels.py, forward and backward).

Shapes: b batch, t new tokens, s cached and new tokens, h query heads, k key/value heads, g queries per key/value head,
e head size, n depth entries, 2 a key and a value, r rows, (b, t, k).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthlm.ops.autograd import call, parts
from depthlm.ops.backend import current_choice, operator, using
from depthlm.ops.depth_attention.naive import MAX_HEAD_SIZE
from depthlm.ops.dtypes import exact_dtype, no_autocast
from depthlm.ops.flash import Bounds, by_cudnn, gpu_flash
from depthlm.ops.flash import backward as backward_by_document
from depthlm.ops.flash import forward as forward_by_document
from depthlm.ops.moda.bank import Bank, Depth
from depthlm.ops.moda.naive import attend_with_scores

# values of the entries that are in fp32 at a time: few enough for a CPU's cache, and enough to occupy a GPU
CHUNK = 2**18
GPU_CHUNK = 2**28


def merged_attention(
    q_bhte: Tensor,
    k_bkse: Tensor,
    v_bkse: Tensor,
    depth: Depth,
    mask_b1ts: Tensor | None = None,
    bounds: Bounds | None = None,
) -> Tensor:
    """Return attended_bhte of the last t of s tokens.

    Each token attends to itself and to all tokens before it, and to the depth entries at its own position.
    depth: at least one entry. mask_b1ts: replaces the causal mask; each token must attend to at least one token.
    bounds: limit attention to documents on a GPU, where `flash.takes_documents` holds, without a mask and a cache.
    """
    if bounds is not None:
        return attend_with_flash(q_bhte, k_bkse, v_bkse, depth, bounds=bounds)
    is_fast = has_flash(q_bhte, k_bkse, mask_b1ts) and current_choice() != "naive"
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
    """Return attended_bhte from a flash attention and a depth part."""
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
        attended_bhte, merged_bht = moda_depth(q_bhte, out_bhte, lse_bht, entries_n2btke)
        ctx.save_for_backward(q_bhte, k_bkse, v_bkse, mask_b1ts, attended_bhte, merged_bht, bank.entries_n2btke)
        # not the bank itself: unlike saved tensors, attributes of ctx stay after the backward pass
        ctx.sums, ctx.range = bank.sums, (start, start + len(entries_n2btke))
        ctx.kernels, ctx.bounds = current_choice(), bounds
        return attended_bhte

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_bhte: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, attended, merged_bht, bank_n2btke = ctx.saved_tensors
        saved = q, k, v, attended, merged_bht
        grad_q, grad_k, grad_v = _flash_backward(grad_bhte, saved, mask, ctx.bounds, ctx.rest)
        entries, (sums, fresh) = bank_n2btke[slice(*ctx.range)], ctx.sums.reserve(bank_n2btke, *ctx.range)
        with using(ctx.kernels):
            grad_q = moda_depth_backward(grad_bhte, q, attended, merged_bht, grad_q, entries, sums, fresh)
        return grad_q, grad_k, grad_v, None, None, None, None, None, None


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bounds: Bounds | None) -> Any:
    if bounds is not None:
        return forward_by_document(q, k, v, bounds)
    causal, aten = mask is None and q.shape[2] == k.shape[2], torch.ops.aten
    if q.is_cpu:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=_add_mask(mask, q))
    if by_cudnn(q, k, v, causal):
        out, lse, *rest = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
        return out, lse.view(q.shape[:3]), lse.shape, *rest
    return (*aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal),)


def _flash_backward(
    grad: Tensor, saved: tuple[Tensor, ...], mask: Tensor | None, bounds: Bounds | None, rest: Any
) -> Any:
    q, k, v, out, lse = saved
    if bounds is not None:
        return backward_by_document(grad, saved[:-1], lse, bounds, rest)
    causal, aten = mask is None and q.shape[2] == k.shape[2], torch.ops.aten
    if q.is_cpu:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=_add_mask(mask, q)
        )
    # the forward pass returned lengths, random state and a debug mask, and with cuDNN first the shape of its lse
    *shapes, starts_q, starts_k, longest_q, longest_k, seed, offset, _ = rest
    lengths = starts_q, starts_k, longest_q, longest_k
    if shapes:
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.view(shapes[0]), seed, offset, None, *lengths, 0.0, causal
        )
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, causal, seed, offset
    )


def _add_mask(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the mask as an additive one, since the operator does not take a boolean mask."""
    return None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)


def _triton_forward() -> Callable[..., tuple[Tensor, Tensor]]:
    from depthlm.ops.moda.triton import forward

    return forward


def _triton_backward() -> Callable[..., Tensor]:
    from depthlm.ops.moda.triton import backward

    return backward


def _unsupported(q_bhte: Tensor, *_: object) -> str | None:
    e = q_bhte.shape[3]
    return f"head size {e} is above {MAX_HEAD_SIZE}" if e > MAX_HEAD_SIZE else None


@operator("moda", triton=_triton_forward, unsupported=_unsupported)
def moda_depth(q_bhte: Tensor, out_bhte: Tensor, lse_bht: Tensor, entries_n2btke: Tensor) -> tuple[Tensor, Tensor]:
    """Return o' as attended_bhte in the dtype of q, and l' as lse_bht, contiguous, in fp32 or better. No autograd.

    out_bhte, lse_bht: o and l.
    Raises, if Triton kernels run: ValueError for a wrong shape or device, TypeError for a wrong dtype.
    """
    dtype, scale = exact_dtype([q_bhte]), q_bhte.shape[3] ** -0.5
    (q_rge, out_rge, lse_rg1), keys_nre, values_nre = _rows(entries_n2btke, q_bhte, out_bhte, lse_bht[..., None])
    attended_rge, merged_rg1 = q_rge.new_empty(q_rge.shape), lse_rg1.new_empty(lse_rg1.shape)
    with no_autocast(q_bhte):
        for part in _parts(keys_nre):
            q, out, lse = (x[part].to(dtype) for x in (q_rge, out_rge, lse_rg1))
            key_rne, value_rne = (x[:, part].transpose(0, 1).to(dtype) for x in (keys_nre, values_nre))
            # with beta=0, lse is ignored
            score_rgn = torch.baddbmm(lse, q, key_rne.mT, beta=0, alpha=scale)
            merged = torch.logaddexp(lse, score_rgn.logsumexp(-1, keepdim=True))
            p_rgn = score_rgn.sub_(merged).exp_()
            attended_rge[part] = torch.baddbmm(out * (lse - merged).exp_(), p_rgn, value_rne)
            merged_rg1[part] = merged
    # a flash backward pass on a GPU requires a contiguous log-sum-exp
    return _heads(attended_rge, q_bhte), _heads(merged_rg1, q_bhte)[..., 0].contiguous()


@operator("moda", triton=_triton_backward, unsupported=_unsupported)
def moda_depth_backward(
    grad_bhte: Tensor,
    q_bhte: Tensor,
    attended_bhte: Tensor,
    lse_bht: Tensor,
    grad_q_bhte: Tensor,
    entries_n2btke: Tensor,
    sums_n2btke: Tensor,
    fresh: int,
) -> Tensor:
    """Return the gradient of q, in its dtype, and add those of the entries to the sums, in place.

    attended_bhte, lse_bht: o' and l' of `moda_depth`. grad_q_bhte: the gradient of q from the sequence part.
    fresh: sums[:fresh] are undefined and are replaced; to the others, gradients are added.
    Raises, if Triton kernels run: ValueError for a wrong shape or device, TypeError for a wrong dtype.
    """
    dtype, scale = exact_dtype([q_bhte]), q_bhte.shape[3] ** -0.5
    queries = grad_bhte, q_bhte, attended_bhte, lse_bht[..., None], grad_q_bhte
    tensors, *entries_nre = _rows(entries_n2btke, *queries)
    sums_nre = sums_n2btke.flatten(2, 4).unbind(1)
    total_rge = tensors[1].new_empty(tensors[1].shape)
    with no_autocast(q_bhte):
        for part in _parts(entries_nre[0]):
            grad, q, attended, lse, grad_q = (x[part].to(dtype) for x in tensors)
            key_rne, value_rne = (x[:, part].transpose(0, 1).to(dtype) for x in entries_nre)
            delta = (grad * attended).sum(-1, keepdim=True)
            p_rgn = torch.baddbmm(lse, q, key_rne.mT, beta=-1, alpha=scale).exp_()
            grad_score_rgn = torch.baddbmm(delta, grad, value_rne.mT, beta=-1).mul_(p_rgn).mul_(scale)
            total_rge[part] = torch.baddbmm(grad_q, grad_score_rgn, key_rne)
            for weights_rgn, x_rge, sums in zip((grad_score_rgn, p_rgn), (q, grad), sums_nre, strict=True):
                products_nre = (weights_rgn.mT @ x_rge).transpose(0, 1)
                sums[:fresh, part] = products_nre[:fresh]
                sums[fresh:, part] += products_nre[fresh:]
    return _heads(total_rge, q_bhte)


def _rows(entries_n2btke: Tensor, *queries_bhte: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return x_rge of queries, and k_nre and v_nre of entries."""
    groups = queries_bhte[0].shape[1] // entries_n2btke.shape[4]
    rows_rge = [x.transpose(1, 2).unflatten(2, (-1, groups)).flatten(0, 2) for x in queries_bhte]
    keys_nre, values_nre = entries_n2btke.flatten(2, 4).unbind(1)
    return rows_rge, keys_nre, values_nre


def _heads(x_rge: Tensor, like_bhte: Tensor) -> Tensor:
    """Return x_bhte of rows."""
    b, h, t, _ = like_bhte.shape
    return x_rge.view(b, t, h, -1).transpose(1, 2)


def _parts(entries_nre: Tensor) -> Iterator[slice]:
    """Yield the rows that are worked on at a time."""
    n, r, e = entries_nre.shape
    return parts(r, max(1, (CHUNK if entries_nre.is_cpu else GPU_CHUNK) // (e * n)), entries_nre)
