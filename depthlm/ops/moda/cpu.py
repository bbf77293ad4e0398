"""The depth part of MoDA (arXiv 2603.15619): it merges depth entries into an attention over the sequence.

With the context o and the log-sum-exp l of the sequence part, and depth scores s_j = q . k_j / sqrt(e),

    l' = log(exp l + sum_j exp s_j);    o' = exp(l - l') o + sum_j exp(s_j - l') v_j.

Autograd does not differentiate these functions: `depthlm.ops.moda.merge` combines them with a flash attention. All
entries are in one tensor, and so are the sums of their gradients (`depthlm.ops.moda.bank`).

With flash attention it is 1.9 times as fast as the definition on a CPU (benchmarks/definitions.py).

Shapes: b batch, t tokens, h query heads, k key/value heads, g queries per key/value head, e head size, n depth entries,
2 a key and a value, r rows of a head's entries (b, t, k).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from depthlm.ops.backend import operator
from depthlm.ops.call import parts
from depthlm.ops.depth_attention.naive import MAX_HEAD_SIZE
from depthlm.ops.dtypes import exact_dtype, no_autocast

# values of the entries that are in fp32 at a time: few enough for a CPU's cache, and enough to occupy a GPU
CHUNK = 2**18
GPU_CHUNK = 2**28


def _forward() -> Callable[..., tuple[Tensor, Tensor]]:
    from depthlm.ops.moda.triton import moda_depth

    return moda_depth


def _backward() -> Callable[..., Tensor]:
    from depthlm.ops.moda.triton import moda_depth_backward

    return moda_depth_backward


def _unsupported(q_bhte: Tensor, *_: object) -> str | None:
    e = q_bhte.shape[3]
    return f"head size {e} is above {MAX_HEAD_SIZE}" if e > MAX_HEAD_SIZE else None


@operator("moda", triton=_forward, unsupported=_unsupported)
def moda_depth(q_bhte: Tensor, out_bhte: Tensor, lse_bht: Tensor, entries_n2btke: Tensor) -> tuple[Tensor, Tensor]:
    """Return o' as context_bhte in the dtype of q, and l' as lse_bht, contiguous, in fp32 or better.

    out_bhte, lse_bht: o and l.
    Raises, if Triton kernels run: ValueError for a wrong shape or device, TypeError for a wrong dtype.
    """
    dtype, scale = exact_dtype([q_bhte]), q_bhte.shape[3] ** -0.5
    tensors, keys_nre, values_nre = _rows(entries_n2btke, q_bhte, out_bhte, lse_bht[..., None])
    context_rge, merged_rg1 = (x.new_empty(x.shape) for x in tensors[::2])
    step, buffer = _buffer(keys_nre, dtype)
    with no_autocast(q_bhte):
        for part in parts(keys_nre.shape[1], step, q_bhte):
            q, out, lse, context, merged = (x[part] for x in (*tensors, context_rge, merged_rg1))
            key_rne = _exact(keys_nre[:, part], buffer)
            score_rgn = torch.baddbmm(lse, q.to(dtype), key_rne.mT, beta=0, alpha=scale)
            torch.logaddexp(lse, score_rgn.logsumexp(-1, keepdim=True), out=merged)
            exact = out * (lse - merged).exp_()
            p_rgn = score_rgn.sub_(merged).exp_()
            context.copy_(exact.baddbmm_(p_rgn, _exact(values_nre[:, part], buffer)))
    # a flash backward pass on a GPU requires a contiguous log-sum-exp
    return _heads(context_rge, q_bhte), _heads(merged_rg1, q_bhte)[..., 0].contiguous()


@operator("moda", triton=_backward, unsupported=_unsupported)
def moda_depth_backward(
    grad_bhte: Tensor,
    q_bhte: Tensor,
    context_bhte: Tensor,
    lse_bht: Tensor,
    grad_q_bhte: Tensor,
    entries_n2btke: Tensor,
    sums_n2btke: Tensor,
    fresh: int = 0,
) -> Tensor:
    """Return the gradient of q, in its dtype, and add those of the entries to the sums, in place.

    context_bhte, lse_bht: o' and l' of `moda_depth`. grad_q_bhte: the gradient of q from the sequence part.
    fresh: the number of the first entries whose sums are undefined, and are replaced.
    Raises, if Triton kernels run: ValueError for a wrong shape or device, TypeError for a wrong dtype.
    """
    dtype, scale = exact_dtype([q_bhte]), q_bhte.shape[3] ** -0.5
    queries = grad_bhte, q_bhte, context_bhte, lse_bht[..., None], grad_q_bhte
    tensors, *entries_nre = _rows(entries_n2btke, *queries)
    sums_nre = sums_n2btke.flatten(2, 4).unbind(1)
    total_rge = tensors[1].new_empty(tensors[1].shape)
    (step, buffer), *buffers = (_buffer(entries_nre[0], dtype) for _ in range(3))
    with no_autocast(q_bhte):
        for part in parts(entries_nre[0].shape[1], step, q_bhte):
            grad, q, context, lse, grad_q, total = (x[part] for x in (*tensors, total_rge))
            grad, q = grad.to(dtype), q.to(dtype)
            key_rne, value_rne = (_exact(x[:, part], rows) for x, (_, rows) in zip(entries_nre, buffers, strict=True))
            delta = (grad * context).sum(-1, keepdim=True)
            p_rgn = torch.baddbmm(lse, q, key_rne.mT, beta=-1, alpha=scale).exp_()
            grad_score_rgn = torch.baddbmm(delta, grad, value_rne.mT, beta=-1).mul_(p_rgn).mul_(scale)
            total.copy_(torch.baddbmm(grad_q.to(dtype), grad_score_rgn, key_rne))
            for weights_rgn, x_rge, sums in zip((grad_score_rgn, p_rgn), (q, grad), sums_nre, strict=True):
                _add_products(sums[:, part], weights_rgn, x_rge, fresh, buffer)
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


def _buffer(entries_nre: Tensor, dtype: torch.dtype) -> tuple[int, Tensor]:
    """Return how many rows are worked on at a time, and a buffer for all of their entries.

    All chunks of rows use the buffer, so it stays in the cache.
    """
    n, r, e = entries_nre.shape
    step = min(r, max(1, (CHUNK if entries_nre.is_cpu else GPU_CHUNK) // (e * n)))
    return step, entries_nre.new_empty(n * step, e, dtype=dtype)


def _add_products(sums_nre: Tensor, weights_rgn: Tensor, x_rge: Tensor, fresh: int, buffer: Tensor) -> None:
    """Add the gradients of a chunk of entries to their sums; replace the first `fresh` sums."""
    n, r, _ = sums_nre.shape
    product_rne = buffer[: n * r].view(r, n, -1)
    product_nre = product_rne.transpose(0, 1)
    if sums_nre.dtype == buffer.dtype:
        torch.bmm(weights_rgn.mT, x_rge, out=product_rne)
        sums_nre[:fresh].copy_(product_nre[:fresh])
        sums_nre[fresh:].add_(product_nre[fresh:])
    else:
        # an addition in place of two dtypes would make copies of both
        product_nre[:fresh].zero_()
        product_nre[fresh:].copy_(sums_nre[fresh:])
        product_rne.baddbmm_(weights_rgn.mT, x_rge)
        sums_nre.copy_(product_nre)


def _exact(entries_nre: Tensor, buffer: Tensor) -> Tensor:
    """Return x_rne of a chunk in the dtype of the buffer, copied to the buffer if it has another dtype."""
    n, r, _ = entries_nre.shape
    if entries_nre.dtype != buffer.dtype:
        entries_nre = buffer[: n * r].view(n, r, -1).copy_(entries_nre)
    return entries_nre.transpose(0, 1)
