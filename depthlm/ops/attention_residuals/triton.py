# mypy: allow-untyped-defs, disable-error-code="assignment"
"""`depth_attend` in Triton. Each launch takes all sources, and up to MAX_READS reads.

The forward pass computes the scores, their softmax, and then a tile of all reads per program. The backward pass
computes the gradients of the scores, for which it needs all dimensions, and then the gradients of everything else.
One read of at most ADDRESSES sources has its own kernels.

Shapes: s reads, n sources, p positions, d width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthlm.ops.attention_residuals.one_triton import KERNELS as KERNELS_OF_ONE
from depthlm.ops.autograd import operator_name
from depthlm.ops.backend import expect
from depthlm.ops.reads import BACKWARD, FORWARD, BackwardInputs, Kernels, read
from depthlm.ops.reads_triton import (
    ADDRESSES,
    COUNTS,
    DOT_READS,
    FEW_WARPS,
    HALF_ROWS,
    READS,
    ROWS,
    WARPS,
    WIDTH,
    aligned,
    inputs_of,
    load_reads,
    load_row,
    load_source,
    row_programs,
    row_tiles,
    scores,
    store_grad,
    store_reads,
    tile_at,
)
from depthlm.ops.triton_common import load_fp32, tl, triton

# positions of a program of the softmax
SOFTMAX_ROWS = tl.constexpr(128)


def depth_attend(
    query_sd: Tensor,
    sources: Sequence[Tensor],
    eps: float | None,
    bias_n: Tensor | None = None,
    start: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run `depth_attend`. Raises: ValueError for a wrong shape or device, TypeError for a wrong dtype."""
    (*positions, d), bias = sources[0].shape, [] if bias_n is None else [bias_n]
    expect("attention_residuals", query_sd, query=(query_sd, (len(query_sd), d)))
    for x in bias:
        expect("attention_residuals", query_sd, bias=(x, (len(sources),)))
    if start is not None:
        expect("attention_residuals", query_sd, **{"start of lse": (start[1], (len(query_sd), *positions))})
    kernels = KERNELS_OF_ONE if len(query_sd) == 1 and len(sources) <= ADDRESSES else KERNELS
    out_spd, lse_sp = read(kernels, [query_sd], sources, start or (), eps, bias)
    return out_spd, lse_sp


def allocate(parameters: list[Tensor], sources: list[Tensor]) -> list[Tensor]:
    """Return empty lse_sp, raw_nsp (q . x), scale_np (1 / rms) and weight_nsp (the softmax)."""
    (*shape, _), n, reads = sources[0].shape, len(sources), len(parameters[0])
    positions = sources[0].shape[:-1].numel()
    shapes = (reads, *shape), (n, reads, positions), (n, positions), (n, reads, positions)
    return [sources[0].new_empty(x, dtype=torch.float32) for x in shapes]


@torch.library.custom_op(operator_name(__name__, "depth_attend"), **FORWARD)
def forward(parameters, sources, start, eps, outputs):
    query, *bias = (aligned(x) for x in parameters)
    out, lse, raw, scale, weight = outputs
    inputs = inputs_of(sources, len(query))
    scores(query, inputs, raw, scale, eps)
    start_out, start_lse = [aligned(x) for x in start] or (out, lse)
    started, grid = int(bool(start)), (triton.cdiv(inputs.sizes[1], SOFTMAX_ROWS.value),)
    score_ptrs = raw, scale, *(bias or [raw])
    with torch.cuda.device_of(out):
        _softmax[grid](score_ptrs, start_lse, weight, lse, *inputs.sizes, started, len(bias), num_warps=FEW_WARPS)
    tensors = (inputs.table, weight, lse), (start_out, start_lse), out
    inputs.launch(_forward, inputs.tiles, WARPS, tensors, started)


@torch.library.custom_op(operator_name(__name__, "depth_attend_backward"), **BACKWARD)
def launch_backward(grads, outputs, parameters, sources, start, eps, source_grads, added, sums):
    lse, raw, scale, weight = outputs
    grad, query, *start = (aligned(x) for x in (grads[0], parameters[0], *start))
    grad_lse = aligned(grads[1]) if len(grads) > 1 else torch.zeros_like(lse)
    partial_query, partial_bias, *start_grads = sums
    inputs, started = inputs_of(sources, len(query), source_grads, added), int(bool(start))
    n, positions, reads = inputs.sizes
    # the products of sources, and of the start, with the gradients of the outputs
    product = raw.new_empty(n + started, reads, positions)
    grad_raw, along = torch.empty_like(raw), torch.empty_like(scale)
    # without a start, these pointers are not used
    start_out, start_lse = start or (grad, lse)
    grad_start, grad_start_lse = start_grads or (grad, lse)
    programs, rows = row_programs(positions)
    num_row_tiles, num_column_tiles = inputs.tiles
    read_ptrs = grad, grad_lse, inputs.table, lse, raw, scale, weight, start_out, start_lse
    output_ptrs = product, grad_raw, along, partial_bias, grad_start_lse
    inputs.launch(_score_grads, (num_row_tiles,), WARPS, [read_ptrs, output_ptrs], started, EPS=eps)
    read_ptrs = grad, inputs.table, query, lse, weight, start_lse, grad_raw, along
    output_ptrs = partial_query, grad_start
    inputs.launch(_source_grads, (num_column_tiles, programs), FEW_WARPS, [read_ptrs, output_ptrs], rows, started)


def backward(inputs: BackwardInputs) -> list[Tensor]:
    (query, *bias), lse = inputs.parameters, inputs.outputs[0]
    positions = lse[0].numel()
    partial_query = lse.new_empty(row_programs(positions)[0], *query.shape)
    partial_bias = lse.new_empty(row_tiles(positions), len(inputs.sources))
    start_grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs.start]
    launch_backward(*inputs, [partial_query, partial_bias, *start_grads])
    return [partial_query.sum(0).to(query.dtype), *(partial_bias.sum(0).to(x.dtype) for x in bias), *start_grads]


KERNELS = Kernels("attention_residuals", 2, allocate, forward, backward, saves_start=True)


@triton.jit(do_not_specialize=COUNTS)
def _softmax(score_ptrs, start_lse_ptr, weight_ptr, lse_ptr, n, positions, reads, started, biased):
    p = (tl.program_id(0) * SOFTMAX_ROWS + tl.arange(0, SOFTMAX_ROWS))[None, :]
    s = tl.arange(0, READS)[:, None]
    mask = (p < positions) & (s < reads)
    top = tl.load(start_lse_ptr + s * positions + p, mask & (started != 0), other=float("-inf")).to(tl.float32)
    # without a start, its share is zero
    total = tl.zeros([READS, SOFTMAX_ROWS], tl.float32) + tl.where(started != 0, 1.0, 0.0)
    for j in range(n):
        score = _score(score_ptrs, s, j, p, positions, reads, biased)
        higher = tl.maximum(top, score)
        total = total * tl.exp(top - higher) + tl.exp(score - higher)
        top = higher
    lse = top + tl.log(total)
    tl.store(lse_ptr + s * positions + p, lse, mask)
    for j in range(n):
        score = _score(score_ptrs, s, j, p, positions, reads, biased)
        tl.store(weight_ptr + (j * reads + s) * positions + p, tl.exp(score - lse), mask)


@triton.jit
def _score(score_ptrs, s, j, p, positions, reads, biased):
    raw_ptr, scale_ptr, bias_ptr = score_ptrs
    scale = tl.load(scale_ptr + j * positions + p, p < positions, other=0.0)
    bias = tl.load(bias_ptr + j, biased != 0, other=0.0).to(tl.float32)
    return tl.load(raw_ptr + (j * reads + s) * positions + p, (p < positions) & (s < reads), other=0.0) * scale + bias


@triton.jit
def _start_share(start_lse_ptr, lse_ptr, s, p, positions, reads):
    """Return the weight of the start of read s."""
    start_lse = load_row(start_lse_ptr, s, p, positions, reads)
    return tl.exp(start_lse - load_row(lse_ptr, s, p, positions, reads))[:, None]


@triton.jit(do_not_specialize=COUNTS)
def _forward(read_ptrs, start_ptrs, out_ptr, n, positions, reads, started, D: tl.constexpr, NARROW: tl.constexpr):
    table_ptr, weight_ptr, lse_ptr = read_ptrs
    start_ptr, start_lse_ptr = start_ptrs
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at, mask = tile_at(p, c, positions, D)
    out = load_reads(start_ptr, at, mask & (started != 0), positions, reads, D)
    if started != 0:
        shares = ()
        for s in tl.static_range(READS):
            shares += (out[s] * _start_share(start_lse_ptr, lse_ptr, s, p, positions, reads),)
        out = shares
    for j in range(n):
        x = load_source(table_ptr, j, at, mask, NARROW)
        sums = ()
        for s in tl.static_range(READS):
            total = out[s]
            if s < reads:
                total += load_row(weight_ptr, j * reads + s, p, positions, n * reads)[:, None] * x
            sums += (total,)
        out = sums
    store_reads(out_ptr, at, out, mask, positions, reads, D)


@triton.jit
def _add(to_ptr, products, mask, first):
    """Add the row sums of a tile to those of the tiles before; the first tile, with first = 0, replaces them."""
    total = tl.load(to_ptr, mask & (first > 0), other=0.0)
    tl.store(to_ptr, total + tl.sum(products, axis=1), mask)


@triton.jit(do_not_specialize=COUNTS)
def _score_grads(
    read_ptrs, output_ptrs, n, positions, reads, started, D: tl.constexpr, NARROW: tl.constexpr, EPS: tl.constexpr
):
    grad_ptr, grad_lse_ptr, table_ptr, lse_ptr, raw_ptr, scale_ptr, weight_ptr, start_ptr, start_lse_ptr = read_ptrs
    product_ptr, grad_raw_ptr, along_ptr, partial_bias_ptr, grad_start_lse_ptr = output_ptrs
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # a loop of its own, since a start beside the gradients of all reads would not fit into registers
    for k in range(reads * started * tl.cdiv(D, WIDTH)):
        s, first = k % reads, k // reads * WIDTH
        c = first + tl.arange(0, WIDTH)
        mask = (p < positions)[:, None] & (c < D)[None, :]
        at = (tl.cast(positions, tl.int64) * s + p)[:, None] * D + c[None, :]
        products = load_fp32(grad_ptr, at, mask) * load_fp32(start_ptr, at, mask)
        _add(product_ptr + (n * reads + s) * positions + p, products, p < positions, first)
        # the sums that one thread stored may be read by others
        tl.debug_barrier()
    for first in range(0, D, WIDTH):
        c = first + tl.arange(0, WIDTH)
        at, mask = tile_at(p, c, positions, D)
        grad = load_reads(grad_ptr, at, mask, positions, reads, D)
        for j in range(n):
            x = load_source(table_ptr, j, at, mask, NARROW)
            for s in tl.static_range(READS):
                if s < reads:
                    _add(product_ptr + (j * reads + s) * positions + p, grad[s] * x, p < positions, first)
        # as above
        tl.debug_barrier()
    q, s = p[None, :], tl.arange(0, READS)[:, None]
    at, mask = s * positions + q, (q < positions) & (s < reads)
    start_lse = tl.load(start_lse_ptr + at, mask & (started != 0), other=float("-inf")).to(tl.float32)
    share = tl.exp(start_lse - tl.load(lse_ptr + at, mask, other=0.0))
    start_product = tl.load(product_ptr + n * reads * positions + at, mask & (started != 0), other=0.0)
    # the term that the gradients of all scores share
    common = share * start_product - load_fp32(grad_lse_ptr, at, mask)
    for j in range(n):
        row_at = j * reads * positions + at
        common += tl.load(weight_ptr + row_at, mask, other=0.0) * tl.load(product_ptr + row_at, mask, other=0.0)
    if started != 0:
        grad_start_lse = share * (start_product - common)
        tl.store(grad_start_lse_ptr + at, grad_start_lse.to(grad_start_lse_ptr.dtype.element_ty), mask)
    for j in range(n):
        row_at = j * reads * positions + at
        product, weight = tl.load(product_ptr + row_at, mask, other=0.0), tl.load(weight_ptr + row_at, mask, other=0.0)
        scale = tl.load(scale_ptr + j * positions + p, p < positions, other=0.0)
        grad_score = weight * (product - common)
        tl.store(partial_bias_ptr + tl.program_id(0) * n + j, tl.sum(tl.sum(grad_score, axis=0), axis=0))
        grad_raw = grad_score * scale[None, :]
        tl.store(grad_raw_ptr + row_at, grad_raw, mask)
        along = tl.zeros([ROWS], tl.float32)
        if EPS is not None:
            # the gradient of rms(x) is parallel to x
            along = tl.sum(grad_raw * tl.load(raw_ptr + row_at, mask, other=0.0), axis=0) * scale * scale / D
        tl.store(along_ptr + j * positions + p, along, p < positions)


@triton.jit(do_not_specialize=COUNTS)
def _source_grads(read_ptrs, output_ptrs, n, positions, reads, rows, started, D: tl.constexpr, NARROW: tl.constexpr):
    grad_ptr, table_ptr, query_ptr, lse_ptr, weight_ptr, start_lse_ptr, grad_raw_ptr, along_ptr = read_ptrs
    partial_query_ptr, grad_start_ptr = output_ptrs
    c, dot_s = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, DOT_READS)[:, None]
    query_mask = (dot_s < reads) & (c < D)[None, :]
    query = load_fp32(query_ptr, dot_s * D + c[None, :], query_mask)
    grad_query = tl.zeros([DOT_READS, WIDTH], tl.float32)
    first = tl.program_id(1) * rows
    for row in range(first, min(first + rows, positions), HALF_ROWS):
        p = row + tl.arange(0, HALF_ROWS)
        at, mask = tile_at(p, c, positions, D)
        grad = load_reads(grad_ptr, at, mask, positions, reads, D)
        if started != 0:
            for s in tl.static_range(READS):
                grad_start = grad[s] * _start_share(start_lse_ptr, lse_ptr, s, p, positions, reads)
                read_at = tl.cast(positions, tl.int64) * (s * D) + at
                tl.store(grad_start_ptr + read_at, grad_start.to(grad_start_ptr.dtype.element_ty), mask & (s < reads))
        for j in range(n):
            x = load_source(table_ptr, j, at, mask, NARROW)
            raw_at = (j * reads + dot_s) * positions + p[None, :]
            grad_raw = tl.load(grad_raw_ptr + raw_at, (dot_s < reads) & (p < positions)[None, :], other=0.0)
            grad_query = tl.dot(grad_raw, x, grad_query, input_precision="tf32x3")
            grad_x = tl.dot(tl.trans(grad_raw), query, input_precision="tf32x3")
            grad_x -= tl.load(along_ptr + j * positions + p, p < positions, other=0.0)[:, None] * x
            for s in tl.static_range(READS):
                if s < reads:
                    grad_x += load_row(weight_ptr, j * reads + s, p, positions, n * reads)[:, None] * grad[s]
            store_grad(table_ptr, j, at, grad_x, mask, NARROW)
    tl.store(partial_query_ptr + (tl.program_id(1) * reads + dot_s) * D + c[None, :], grad_query, query_mask)
