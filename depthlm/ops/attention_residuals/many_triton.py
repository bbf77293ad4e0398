# mypy: allow-untyped-defs, disable-error-code="assignment"
"""`depth_attend` for several reads in Triton.

The forward pass computes the scores, their softmax, and then a tile of all reads per program. The backward pass
computes the gradients of the scores, for which it needs all dimensions, and then the gradients of everything else.

Shapes: s reads, n sources, p positions, d width, r programs. A tile: R positions, C dimensions.
"""

import torch
from torch import Tensor

from depthlm.ops.call import operator_name
from depthlm.ops.reads_triton import (
    COUNTS,
    DOT_READS,
    FEW_WARPS,
    HALF_ROWS,
    MAX_READS,
    TILE_ROWS,
    TILE_WIDTH,
    WARPS,
    aligned,
    load_reads,
    load_source,
    narrow_dtype,
    row_programs,
    scores,
    store_grad,
    store_reads,
    table_of,
)
from depthlm.ops.source_sums import reserve_sums, returned
from depthlm.ops.triton_common import tl, triton

# positions of a program of the softmax
SOFTMAX_ROWS = 128


@torch.library.custom_op(operator_name(__name__, "depth_attend_many"), mutates_args=())
def forward(
    query_sd: Tensor,
    sources: list[Tensor],
    eps: float | None,
    bias_n: Tensor | None,
    start_spd: Tensor | None,
    start_sp: Tensor | None,
    dtype: torch.dtype,
    tokens: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return out_spd in `dtype`, lse_sp, and for the backward pass raw_nsp, the scale_np of raw and weight_nsp."""
    (reads, d), shape, n = query_sd.shape, sources[0].shape, len(sources)
    xs, positions = [aligned(x) for x in sources], shape[:-1].numel()
    table = table_of(xs)
    raw, scale = scores(aligned(query_sd), table, xs, reads, eps)
    out, lse = raw.new_empty(reads, *shape, dtype=dtype), raw.new_empty(reads, *shape[:-1])
    weight = torch.empty_like(raw)
    start, start_lse = (y if x is None else aligned(x) for x, y in ((start_spd, out), (start_sp, lse)))
    counts, started = (n, positions, reads), int(start_spd is not None)
    with torch.cuda.device_of(out):
        _softmax[(triton.cdiv(positions, SOFTMAX_ROWS),)](
            raw, scale, raw if bias_n is None else aligned(bias_n), start_lse, weight, lse, *counts, started,
            int(bias_n is not None), R=SOFTMAX_ROWS, S=MAX_READS, num_warps=FEW_WARPS,
        )  # fmt: skip
        _forward[(triton.cdiv(positions, TILE_ROWS), triton.cdiv(d, TILE_WIDTH))](
            table, weight, start, start_lse, lse, out, *counts, started, D=d, R=TILE_ROWS, C=TILE_WIDTH, S=MAX_READS,
            NARROW=narrow_dtype(xs), num_warps=WARPS,
        )  # fmt: skip
    return out, lse, raw, scale, weight


@torch.library.custom_op(operator_name(__name__, "depth_attend_many_backward"), mutates_args=("grads",))
def backward(
    grad_spd: Tensor,
    grad_sp: Tensor,
    lse_sp: Tensor,
    raw_nsp: Tensor,
    scale_np: Tensor,
    weight_nsp: Tensor,
    query_sd: Tensor,
    sources: list[Tensor],
    normed: bool,
    bias_n: Tensor | None,
    start_spd: Tensor | None,
    start_sp: Tensor | None,
    grads: list[Tensor],
    added: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query_sd, and of bias_n, start_spd and start_sp, empty if missing.

    Write those of the sources to `grads`, or add them to it.
    """
    (reads, d), n, positions = query_sd.shape, len(sources), lse_sp[0].numel()
    xs, query, grad, grad_lse = [aligned(x) for x in sources], aligned(query_sd), aligned(grad_spd), aligned(grad_sp)
    table, started = table_of(xs, grads, added), int(start_spd is not None)
    # the products of sources, and of the start, with the gradients of the outputs
    product = raw_nsp.new_empty(n + started, reads, positions)
    grad_raw, along = torch.empty_like(raw_nsp), torch.empty_like(scale_np)
    starts = [y if x is None else aligned(x) for x, y in ((start_spd, grad), (start_sp, lse_sp))]
    grad_start, grad_start_lse = (
        like.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, like in ((start_spd, grad), (start_sp, lse_sp))
    )
    blocks, (programs, rows) = triton.cdiv(positions, TILE_ROWS), row_programs(positions)
    partial_bias = raw_nsp.new_empty(blocks, n)
    partial_query = raw_nsp.new_empty(programs, reads, d)
    counts, settings = (n, positions, reads), {"D": d, "C": TILE_WIDTH, "NARROW": narrow_dtype(xs), "S": MAX_READS}
    with torch.cuda.device_of(grad):
        _score_grads[(blocks,)](
            grad, grad_lse, table, lse_sp, raw_nsp, scale_np, weight_nsp, *starts, product, grad_raw, along,
            partial_bias, grad_start_lse, *counts, started, **settings, R=TILE_ROWS, NORMED=normed, num_warps=WARPS,
        )  # fmt: skip
        _source_grads[(triton.cdiv(d, TILE_WIDTH), programs)](
            grad, table, query, lse_sp, weight_nsp, starts[1], grad_raw, along, partial_query, grad_start, *counts,
            rows, started, **settings, R=HALF_ROWS, DOT_S=DOT_READS, num_warps=FEW_WARPS,
        )  # fmt: skip
    grad_bias = query.new_empty(0) if bias_n is None else partial_bias.sum(0).to(bias_n.dtype)
    return partial_query.sum(0).to(query.dtype), grad_bias, grad_start, grad_start_lse


@forward.register_fake
def _(query_sd, sources, eps, bias_n, start_spd, start_sp, dtype, tokens):
    shape, n, reads = sources[0].shape, len(sources), len(query_sd)
    positions = shape[:-1].numel()
    shapes = (reads, *shape[:-1]), (n, reads, positions), (n, positions), (n, reads, positions)
    out = query_sd.new_empty((reads, *shape), dtype=dtype)
    return out, *(query_sd.new_empty(shape, dtype=torch.float32) for shape in shapes)


@backward.register_fake
def _(
    grad_spd,
    grad_sp,
    lse_sp,
    raw_nsp,
    scale_np,
    weight_nsp,
    query_sd,
    sources,
    normed,
    bias_n,
    start_spd,
    start_sp,
    grads,
    added,
):
    likes = (bias_n, query_sd), (start_spd, grad_spd), (start_sp, lse_sp)
    others = (like.new_empty(0) if x is None else x.new_empty(x.shape) for x, like in likes)
    return query_sd.new_empty(query_sd.shape), *others


def _setup_context(ctx, inputs, output):
    query, sources, eps, bias, start, start_lse, _, tokens = inputs
    ctx.num_tokens = len(tokens)
    ctx.normed = eps is not None
    _, *saved = output
    ctx.mark_non_differentiable(*saved[1:])
    ctx.save_for_backward(*saved, query, bias, start, start_lse, *sources)


def _differentiate(ctx, grad, grad_lse, *_):
    lse, raw, scale, weight, query, bias, start, start_lse, *sources = ctx.saved_tensors
    grads, added = reserve_sums(ctx, ctx.num_tokens, sources)
    grad_query, *others = backward(
        grad, grad_lse, lse, raw, scale, weight, query, sources, ctx.normed, bias, start, start_lse, grads, added
    )
    others = [None if x is None else g for x, g in zip((bias, start, start_lse), others, strict=True)]
    of_sources, of_tokens = returned(ctx.num_tokens, grads)
    return grad_query, of_sources, None, *others, None, of_tokens


forward.register_autograd(_differentiate, setup_context=_setup_context)


@triton.jit(do_not_specialize=COUNTS)
def _softmax(
    raw_ptr, scale_ptr, bias_ptr, start_lse_ptr, weight_ptr, lse_ptr, n, positions, reads, started, biased,
    R: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    p, s = (tl.program_id(0) * R + tl.arange(0, R))[None, :], tl.arange(0, S)[:, None]
    inside = (p < positions) & (s < reads)
    top = tl.load(start_lse_ptr + s * positions + p, inside & (started != 0), other=float("-inf")).to(tl.float32)
    # without a start, its share is zero
    total = tl.zeros([S, R], tl.float32) + tl.where(started != 0, 1.0, 0.0)
    for j in range(n):
        score = _score(raw_ptr, scale_ptr, bias_ptr, s, j, p, positions, reads, biased)
        higher = tl.maximum(top, score)
        total = total * tl.exp(top - higher) + tl.exp(score - higher)
        top = higher
    lse = top + tl.log(total)
    tl.store(lse_ptr + s * positions + p, lse, inside)
    for j in range(n):
        score = _score(raw_ptr, scale_ptr, bias_ptr, s, j, p, positions, reads, biased)
        tl.store(weight_ptr + (j * reads + s) * positions + p, tl.exp(score - lse), inside)


@triton.jit
def _score(raw_ptr, scale_ptr, bias_ptr, s, j, p, positions, reads, biased):
    raw = tl.load(raw_ptr + (j * reads + s) * positions + p, (p < positions) & (s < reads), other=0.0)
    bias = tl.load(bias_ptr + j, biased != 0, other=0.0).to(tl.float32)
    return raw * tl.load(scale_ptr + j * positions + p, p < positions, other=0.0) + bias


@triton.jit
def _load_row(ptr, s, p, positions, reads):
    """Load the values of read s from a tensor x_sp."""
    return tl.load(ptr + s * positions + p, (p < positions) & (s < reads), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=COUNTS)
def _forward(
    table_ptr, weight_ptr, start_ptr, start_lse_ptr, lse_ptr, out_ptr, n, positions, reads, started,
    D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, S: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    p, c = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * C + tl.arange(0, C)
    inside = (p < positions)[:, None] & (c < D)[None, :]
    at = tl.cast(p, tl.int64)[:, None] * D + c[None, :]
    out = load_reads(start_ptr, at, inside & (started != 0), positions, reads, D, S)
    if started != 0:
        shared = ()
        for s in tl.static_range(S):
            share = _load_row(start_lse_ptr, s, p, positions, reads) - _load_row(lse_ptr, s, p, positions, reads)
            shared += (out[s] * tl.exp(share)[:, None],)
        out = shared
    for j in range(n):
        x = load_source(table_ptr, j, at, inside, NARROW)
        sums = ()
        for s in tl.static_range(S):
            total = out[s]
            if s < reads:
                total += _load_row(weight_ptr, j * reads + s, p, positions, n * reads)[:, None] * x
            sums += (total,)
        out = sums
    store_reads(out_ptr, at, out, inside, positions, reads, D, S)


@triton.jit
def _add(to_ptr, products, inside, first):
    """Add the sum over a tile's dimensions, of which `first` is the first, to those of the tiles before."""
    total = tl.load(to_ptr, inside & (first > 0), other=0.0)
    tl.store(to_ptr, total + tl.sum(products, axis=1), inside)


@triton.jit(do_not_specialize=COUNTS)
def _score_grads(
    grad_ptr, grad_lse_ptr, table_ptr, lse_ptr, raw_ptr, scale_ptr, weight_ptr, start_ptr, start_lse_ptr,
    product_ptr, grad_raw_ptr, along_ptr, partial_bias_ptr, grad_start_lse_ptr, n, positions, reads, started,
    D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, S: tl.constexpr, NARROW: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    p, of_reads = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, S)[:, None]
    # a loop of its own, since a start beside the gradients of all reads would not fit into registers
    for k in range(tl.cdiv(D, C) * reads * started):
        s, first = k % reads, k // reads * C
        c = first + tl.arange(0, C)
        inside = (p < positions)[:, None] & (c < D)[None, :]
        at = (tl.cast(positions, tl.int64) * s + p)[:, None] * D + c[None, :]
        of_out = tl.load(grad_ptr + at, inside, other=0.0).to(tl.float32)
        start = tl.load(start_ptr + at, inside, other=0.0).to(tl.float32)
        _add(product_ptr + (n * reads + s) * positions + p, of_out * start, p < positions, first)
        # the sums that one thread stored may be read by others
        tl.debug_barrier()
    for first in range(0, D, C):
        c = first + tl.arange(0, C)
        inside = (p < positions)[:, None] & (c < D)[None, :]
        at = tl.cast(p, tl.int64)[:, None] * D + c[None, :]
        grad = load_reads(grad_ptr, at, inside, positions, reads, D, S)
        for j in range(n):
            x = load_source(table_ptr, j, at, inside, NARROW)
            for s in tl.static_range(S):
                if s < reads:
                    _add(product_ptr + (j * reads + s) * positions + p, grad[s] * x, p < positions, first)
        # as above
        tl.debug_barrier()
    q = p[None, :]
    inside = (q < positions) & (of_reads < reads)
    # the term that the gradients of all scores share
    common = -tl.load(grad_lse_ptr + of_reads * positions + q, inside, other=0.0).to(tl.float32)
    at = of_reads * positions + q
    start_lse = tl.load(start_lse_ptr + at, inside & (started != 0), other=float("-inf")).to(tl.float32)
    share = tl.exp(start_lse - tl.load(lse_ptr + at, inside, other=0.0))
    of_start = tl.load(product_ptr + (n * reads + of_reads) * positions + q, inside & (started != 0), other=0.0)
    common += share * of_start
    for j in range(n):
        at = (j * reads + of_reads) * positions + q
        common += tl.load(weight_ptr + at, inside, other=0.0) * tl.load(product_ptr + at, inside, other=0.0)
    if started != 0:
        grad_start_lse = share * (of_start - common)
        to_ptr = grad_start_lse_ptr + of_reads * positions + q
        tl.store(to_ptr, grad_start_lse.to(grad_start_lse_ptr.dtype.element_ty), inside)
    for j in range(n):
        at = (j * reads + of_reads) * positions + q
        product, weight = tl.load(product_ptr + at, inside, other=0.0), tl.load(weight_ptr + at, inside, other=0.0)
        scale = tl.load(scale_ptr + j * positions + p, p < positions, other=0.0)
        grad_score = weight * (product - common)
        tl.store(partial_bias_ptr + tl.program_id(0) * n + j, tl.sum(tl.sum(grad_score, axis=0), axis=0))
        grad_raw = grad_score * scale[None, :]
        tl.store(grad_raw_ptr + at, grad_raw, inside)
        along = tl.zeros([R], tl.float32)
        if NORMED:
            # the gradient of rms(x) is parallel to x
            along = tl.sum(grad_raw * tl.load(raw_ptr + at, inside, other=0.0), axis=0) * scale * scale / D
        tl.store(along_ptr + j * positions + p, along, p < positions)


@triton.jit(do_not_specialize=COUNTS)
def _source_grads(
    grad_ptr, table_ptr, query_ptr, lse_ptr, weight_ptr, start_lse_ptr, grad_raw_ptr, along_ptr, partial_query_ptr,
    grad_start_ptr, n, positions, reads, rows, started, D: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    S: tl.constexpr, DOT_S: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    c, dot_s = tl.program_id(0) * C + tl.arange(0, C), tl.arange(0, DOT_S)[:, None]
    of_query = (dot_s < reads) & (c < D)[None, :]
    query = tl.load(query_ptr + dot_s * D + c[None, :], of_query, other=0.0).to(tl.float32)
    grad_query = tl.zeros([DOT_S, C], tl.float32)
    first = tl.program_id(1) * rows
    for row in range(first, min(first + rows, positions), R):
        p = row + tl.arange(0, R)
        inside = (p < positions)[:, None] & (c < D)[None, :]
        at = tl.cast(p, tl.int64)[:, None] * D + c[None, :]
        grad = load_reads(grad_ptr, at, inside, positions, reads, D, S)
        if started != 0:
            for s in tl.static_range(S):
                share = _load_row(start_lse_ptr, s, p, positions, reads) - _load_row(lse_ptr, s, p, positions, reads)
                grad_start = (grad[s] * tl.exp(share)[:, None]).to(grad_start_ptr.dtype.element_ty)
                read_at = tl.cast(positions, tl.int64) * (s * D) + at
                tl.store(grad_start_ptr + read_at, grad_start, inside & (s < reads))
        for j in range(n):
            x = load_source(table_ptr, j, at, inside, NARROW)
            raw_at = (j * reads + dot_s) * positions + p[None, :]
            grad_raw = tl.load(grad_raw_ptr + raw_at, (dot_s < reads) & (p < positions)[None, :], other=0.0)
            grad_query = tl.dot(grad_raw, x, grad_query, input_precision="tf32x3")
            grad_x = tl.dot(tl.trans(grad_raw), query, input_precision="tf32x3")
            grad_x -= tl.load(along_ptr + j * positions + p, p < positions, other=0.0)[:, None] * x
            for s in tl.static_range(S):
                if s < reads:
                    grad_x += _load_row(weight_ptr, j * reads + s, p, positions, n * reads)[:, None] * grad[s]
            store_grad(table_ptr, j, at, grad_x, inside, NARROW)
    to_ptr = partial_query_ptr + (tl.program_id(1) * reads + dot_s) * D + c[None, :]
    tl.store(to_ptr, grad_query, of_query)
