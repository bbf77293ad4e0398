"""The depth part of MoDA (arXiv 2603.15619): it merges depth entries into an attention over the sequence.

With the context o and the log-sum-exp l of the sequence part, and depth scores s_j = q . k_j / sqrt(e),

    l' = log(exp l + sum_j exp s_j);    o' = exp(l - l') o + sum_j exp(s_j - l') v_j.

Autograd does not differentiate these functions: `depthlm.kernels.moda.merge` combines them with a flash attention.

Shapes: b batch, t tokens, h query heads, k key/value heads, g queries per key/value head, e head size, n depth entries,
r rows of a head's entries (b, t, k).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from depthlm.kernels.backend import expect, fused
from depthlm.kernels.depth_attention.reference import WIDEST, check_entries
from depthlm.kernels.dtypes import exact_dtype, no_autocast

# values of the entries that are in fp32 at a time: few enough for a CPU's cache, and enough to occupy a GPU
CHUNK = 2**19
GPU_CHUNK = 2**28


def moda_depth(
    q_bhte: Tensor, out_bhte: Tensor, lse_bht: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return o' as context_bhte in the dtype of q, and l' as lse_bht, contiguous, in fp32 or better.

    out_bhte, lse_bht: o and l. keys, values: n tensors k_bkte and v_bkte each.
    Raises, if Triton kernels run: ValueError for a wrong shape or device, TypeError for a wrong dtype.
    """
    if not _fused(q_bhte, keys, values):
        return add_depth(q_bhte, out_bhte, lse_bht, keys, values)
    from depthlm.kernels.moda.triton import forward

    expect("moda_depth", q_bhte, out=(out_bhte, q_bhte.shape), lse=(lse_bht, q_bhte.shape[:3]))
    return forward(q_bhte, out_bhte, lse_bht, list(keys), list(values))


def moda_depth_backward(
    grad_bhte: Tensor,
    q_bhte: Tensor,
    context_bhte: Tensor,
    lse_bht: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the gradients of the depth part: grad_q_bhte in fp32 or better, then those of keys and values.

    The gradient of a key or value has its dtype. context_bhte, lse_bht: o' and l' of `moda_depth`.
    Raises, if Triton kernels run: ValueError for a wrong shape or device, TypeError for a wrong dtype.
    """
    if not _fused(q_bhte, keys, values):
        return add_depth_backward(grad_bhte, q_bhte, context_bhte, lse_bht, keys, values)
    from depthlm.kernels.moda.triton import backward

    shapes = {"grad": (grad_bhte, q_bhte.shape), "context": (context_bhte, q_bhte.shape)}
    expect("moda_depth", q_bhte, **shapes, lse=(lse_bht, q_bhte.shape[:3]))
    return backward(grad_bhte, q_bhte, context_bhte, lse_bht, list(keys), list(values))


def _fused(q_bhte: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    """Return whether to run Triton kernels. If so, check the entries."""
    e = q_bhte.shape[3]
    unsupported = f"head size {e} is above {WIDEST}" if e > WIDEST else None
    if not fused("moda_depth", [q_bhte, *keys, *values], unsupported):
        return False
    check_entries("moda_depth", q_bhte, keys, values)
    return True


def add_depth(
    q_bhte: Tensor, out_bhte: Tensor, lse_bht: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Run `moda_depth` in PyTorch."""
    groups, dtype, scale = q_bhte.shape[1] // keys[0].shape[1], exact_dtype([q_bhte]), q_bhte.shape[3] ** -0.5
    q_rge, out_rge, lse_rg1 = (_rows(x, groups) for x in (q_bhte, out_bhte, lse_bht[..., None]))
    keys_re, values_re = ([_rows(x) for x in entries] for entries in (keys, values))
    context_rge, merged_rg1 = q_rge.new_empty(q_rge.shape), lse_rg1.new_empty(lse_rg1.shape)
    buffer = _buffer(keys_re, dtype)
    parts = _chunks([q_rge, out_rge, lse_rg1, context_rge, merged_rg1], keys_re, values_re)
    with no_autocast(q_bhte):
        for q, out, lse, context, merged, key_rows, value_rows in parts:
            key_rne = _stacked(key_rows, buffer)
            score_rgn = torch.baddbmm(lse, q.to(dtype), key_rne.mT, beta=0, alpha=scale)
            torch.logaddexp(lse, score_rgn.logsumexp(-1, keepdim=True), out=merged)
            exact = out * (lse - merged).exp_()
            context.copy_(exact.baddbmm_(score_rgn.sub_(merged).exp_(), _stacked(value_rows, buffer)))
    # a flash backward pass on a GPU requires a contiguous log-sum-exp
    return _heads(context_rge, q_bhte), _heads(merged_rg1, q_bhte)[..., 0].contiguous()


def add_depth_backward(
    grad_bhte: Tensor,
    q_bhte: Tensor,
    context_bhte: Tensor,
    lse_bht: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Run `moda_depth_backward` in PyTorch."""
    groups, dtype, scale = q_bhte.shape[1] // keys[0].shape[1], exact_dtype([q_bhte]), q_bhte.shape[3] ** -0.5
    tensors = grad_bhte, q_bhte, context_bhte, lse_bht[..., None]
    grad_rge, q_rge, context_rge, lse_rg1 = (_rows(x, groups) for x in tensors)
    keys_re, values_re = ([_rows(x) for x in entries] for entries in (keys, values))
    grad_q_rge = q_rge.new_empty(q_rge.shape, dtype=dtype)
    grad_keys, grad_values = ([x.new_empty(x.shape) for x in entries] for entries in (keys_re, values_re))
    key_buffer, value_buffer, buffer = (_buffer(keys_re, dtype) for _ in range(3))
    parts = _chunks([grad_rge, q_rge, context_rge, lse_rg1, grad_q_rge], keys_re, values_re, grad_keys, grad_values)
    with no_autocast(q_bhte):
        for grad, q, context, lse, grad_q, key_rows, value_rows, *grad_rows in parts:
            grad, q = grad.to(dtype), q.to(dtype)
            key_rne, value_rne = _stacked(key_rows, key_buffer), _stacked(value_rows, value_buffer)
            delta = (grad * context).sum(-1, keepdim=True)
            p_rgn = torch.baddbmm(lse, q, key_rne.mT, beta=-1, alpha=scale).exp_()
            grad_score_rgn = torch.baddbmm(delta, grad, value_rne.mT, beta=-1).mul_(p_rgn).mul_(scale)
            torch.bmm(grad_score_rgn, key_rne, out=grad_q)
            for weights_rgn, x_rge, rows in zip((grad_score_rgn, p_rgn), (q, grad), grad_rows, strict=True):
                product_rne = buffer[: len(q) * len(rows)].view(len(q), len(rows), -1)
                torch.bmm(weights_rgn.mT, x_rge, out=product_rne)
                torch._foreach_copy_(rows, product_rne.unbind(1))
    grad_keys, grad_values = ([_heads(x, keys[0]) for x in grads] for grads in (grad_keys, grad_values))
    return _heads(grad_q_rge, q_bhte), grad_keys, grad_values


def _rows(x_bhte: Tensor, groups: int | None = None) -> Tensor:
    """Return x_rge of queries, or x_re of entries if groups is None."""
    x_bthe = x_bhte.transpose(1, 2)
    return (x_bthe if groups is None else x_bthe.unflatten(2, (-1, groups))).flatten(0, 2)


def _heads(x: Tensor, like_bhte: Tensor) -> Tensor:
    """Return x_bhte of rows."""
    b, h, t, _ = like_bhte.shape
    return x.view(b, t, h, -1).transpose(1, 2)


def _step(entries_re: Sequence[Tensor]) -> int:
    """How many rows are worked on at a time."""
    r, e = entries_re[0].shape
    return min(r, max(1, (CHUNK if entries_re[0].is_cpu else GPU_CHUNK) // (e * len(entries_re))))


def _chunks(tensors: Sequence[Tensor], *entries: Sequence[Tensor]) -> Iterator[tuple[Any, ...]]:
    """Yield chunks of rows of all tensors and lists of entries. On meta yield only the first one, as in `parts`."""
    step = _step(entries[0])
    if tensors[0].is_meta:
        tensors, entries = [x[:step] for x in tensors], tuple([x[:step] for x in xs] for xs in entries)
    lists = (zip(*(x.split(step) for x in xs), strict=True) for xs in entries)
    return zip(*(x.split(step) for x in tensors), *lists, strict=True)


def _buffer(entries_re: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return a buffer for all entries of a chunk. All chunks use it, so it stays in the cache."""
    return entries_re[0].new_empty(len(entries_re) * _step(entries_re), entries_re[0].shape[1], dtype=dtype)


def _stacked(rows: tuple[Tensor, ...], buffer: Tensor) -> Tensor:
    """Return x_rne of a chunk, where the rows of an entry are contiguous."""
    stacked = buffer[: len(rows) * len(rows[0])].view(len(rows), *rows[0].shape)
    return torch.stack(rows, out=stacked).transpose(0, 1)
