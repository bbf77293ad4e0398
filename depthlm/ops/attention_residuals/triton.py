# mypy: allow-untyped-defs, disable-error-code="assignment"
"""`depth_attend` in Triton. A program has all sources of one or several positions, and up to MAX_READS reads.

Scores and outputs are matrix products on tensor cores. The columns c of a matrix of scores are the sources of all
positions of the program, of which there are several if sources are few, and its rows r are their reads. Only the blocks
of a position with itself count; elsewhere the weights are zero, so that one product mixes the sources of all positions.
A source is loaded twice forward and twice backward, the second time mostly from the L2 cache.
One read of at most ADDRESSES sources has its own kernels.

Shapes: s reads, n sources, p positions, d width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from depthlm.ops.attention_residuals.one_triton import KERNELS as KERNELS_OF_ONE
from depthlm.ops.backend import expect
from depthlm.ops.depth_reduce import source_scores
from depthlm.ops.library import register
from depthlm.ops.reads import BACKWARD, FORWARD, BackwardInputs, Kernels, read
from depthlm.ops.reads_triton import (
    ADDRESSES,
    BFLOAT16,
    COUNTS,
    DOT_READS,
    MIXED,
    READS,
    Inputs,
    aligned,
    inputs_of,
    load_parts,
    parts_of,
    product,
    rows_of,
    store_typed,
    transposed,
    whole,
)
from depthlm.ops.triton_common import cdiv, constants, load_fp32, on_device, split_work, store_as, tl, triton

# the padded numbers of sources for which the kernels are compiled; more than that are read in turns
FEW_SOURCES, MANY_SOURCES = 16, 64
# sources of all positions of a program, limited by registers
COLUMNS = 32
# dimensions of a tile, and warps of a program; those of a backward pass with FEW_SOURCES
WIDTH, WARPS, FEW_WARPS = 64, 4, 2
# programs of a backward pass, each with its own partial sums
PROGRAMS = 512


class Settings(NamedTuple):
    """Constants of the kernels. D: d. N: n, padded. P: positions of a program. ROWS: their reads, padded. WIDTH: of a
    tile. NARROW: the dtype of 16-bit sources. KIND, GRAD_KIND: of the sources and of the gradients (`load_parts`).
    """

    D: tl.constexpr
    N: tl.constexpr
    P: tl.constexpr
    ROWS: tl.constexpr
    WIDTH: tl.constexpr
    EPS: tl.constexpr
    NARROW: tl.constexpr
    KIND: tl.constexpr
    GRAD_KIND: tl.constexpr


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
    if len(sources) == 1 and start is None and not bias:
        expect("attention_residuals", query_sd, **{"source 0": (sources[0], sources[0].shape)})
        # all weights are 1; for this source alone, the kernels might be compiled once more
        scores = source_scores(query_sd, [sources[0][None]] * len(query_sd), eps)
        return sources[0].expand(len(query_sd), *sources[0].shape), scores[:, 0]
    result: Sequence[Tensor] = start or ()
    for first in range(0, len(sources), MANY_SOURCES):
        part = slice(first, first + MANY_SOURCES)
        xs, shared = sources[part], [x[part] for x in bias]
        kernels = KERNELS_OF_ONE if len(query_sd) == 1 and len(xs) <= ADDRESSES else KERNELS
        result = read(kernels, [query_sd], xs, result, eps, shared)
    out_spd, lse_sp = result
    return out_spd, lse_sp


def allocate(parameters: list[Tensor], sources: list[Tensor]) -> list[Tensor]:
    """Return empty lse_sp, raw_psn (q . x) and scale_pn (1 / rms)."""
    shape, reads, n = sources[0].shape[:-1], len(parameters[0]), len(sources)
    shapes = (reads, *shape), (shape.numel(), reads, n), (shape.numel(), n)
    return [sources[0].new_empty(x, dtype=torch.float32) for x in shapes]


def padded_sources(n: int) -> tuple[int, int]:
    """Return for how many sources a kernel is compiled, and the positions of a program."""
    padded = FEW_SOURCES if n <= FEW_SOURCES else MANY_SOURCES
    return padded, max(1, COLUMNS // padded)


def settings_of(inputs: Inputs, eps: float | None, grad: Tensor | None = None) -> Settings:
    """Return the constants of a kernel; grad: the gradients of the outputs."""
    d, narrow, kind = (x.value for x in inputs.settings)
    padded, positions = padded_sources(inputs.sizes[0])
    # registers limit a tile
    halved = kind != BFLOAT16.value or (grad is not None and padded > COLUMNS)
    rows = max(DOT_READS.value, positions * READS.value)
    # the gradients of bf16 sources are in fp32 if the start was
    grad_kind = kind if grad is None or grad.dtype == torch.bfloat16 else MIXED.value | kind
    return constants(
        Settings, d, padded, positions, rows, WIDTH // 2 if halved else WIDTH, eps, narrow, kind, grad_kind
    )


def _programs(positions: int, n: int) -> tuple[int, int]:
    """Return the programs of the backward pass, and the positions of each."""
    return split_work(positions, PROGRAMS, padded_sources(n)[1])


@register(__name__, "depth_attend", schema=FORWARD)
def forward(parameters, sources, start, eps, outputs):
    query, *bias = (aligned(x) for x in parameters)
    out, lse, raw, scale = outputs
    inputs = inputs_of(sources, len(query))
    # without a bias or a start, these pointers are not used
    read_ptrs = inputs.table, query, *(bias or [query]), *([aligned(x) for x in start] or (out, lse))
    settings, numbers = settings_of(inputs, eps), (*inputs.sizes, int(bool(start)), len(bias))
    grid = (cdiv(inputs.sizes[1], settings.P.value),)
    with on_device(query):
        attention_residuals_forward[grid](read_ptrs, (out, lse, raw, scale), *numbers, settings, num_warps=WARPS)


@register(__name__, "depth_attend_backward", schema=BACKWARD)
def launch_backward(grads, outputs, parameters, sources, start, eps, source_grads, added, sums):
    lse, raw, scale = outputs
    (query, *bias), (grad, *grad_lse), starts = ([aligned(x) for x in y] for y in (parameters, grads, start))
    partial_query, partial_bias, *start_grads = sums
    inputs = inputs_of(sources, len(query), source_grads, added)
    programs, rows = _programs(inputs.sizes[1], len(sources))
    # without a bias, a gradient of lse or a start, these pointers are not used
    read_ptrs = inputs.table, query, *(bias or [query]), *(starts or (grad, lse))
    grad_ptrs = grad, *(grad_lse or [lse]), lse, raw, scale
    sum_ptrs = partial_query, partial_bias, *(start_grads or (grad, lse))
    numbers = *inputs.sizes, rows, int(bool(start)), len(bias), len(grad_lse)
    settings = settings_of(inputs, eps, grad)
    warps = FEW_WARPS if settings.N.value == FEW_SOURCES else WARPS
    with on_device(query):
        attention_residuals_backward[(programs,)](read_ptrs, grad_ptrs, sum_ptrs, *numbers, settings, num_warps=warps)


def backward(inputs: BackwardInputs) -> list[Tensor]:
    (query, *bias), lse, n = inputs.parameters, inputs.outputs[0], len(inputs.sources)
    programs, _ = _programs(lse[0].numel(), n)
    partial_query = lse.new_empty(programs, *query.shape)
    partial_bias = lse.new_empty(programs, padded_sources(n)[1], n)
    start_grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs.start]
    launch_backward(*inputs, [partial_query, partial_bias, *start_grads])
    grad_bias = [partial_bias.sum((0, 1)).to(x.dtype) for x in bias]
    return [partial_query.sum(0).to(query.dtype), *grad_bias, *start_grads]


KERNELS = Kernels("attention_residuals", 2, allocate, forward, backward, saves_start=True)


@triton.jit
def _columns(p, n, positions, SETTINGS):
    """Return the source and the position of each column, and which columns exist."""
    c = tl.arange(0, SETTINGS.P * SETTINGS.N)
    j, p_c = c % SETTINGS.N, p + c // SETTINGS.N
    return j, p_c, (j < n) & (p_c < positions)


@triton.jit
def _rows(p, positions, reads, SETTINGS):
    """Return the read and the position of each row, and which rows exist."""
    r = tl.arange(0, SETTINGS.ROWS)
    s, p_r = r % READS, p + r // READS
    return s, p_r, (s < reads) & (p_r < positions) & (r < SETTINGS.P * READS)


@triton.jit(do_not_specialize=COUNTS)
def attention_residuals_forward(read_ptrs, out_ptrs, n, positions, reads, started, biased, SETTINGS):
    table_ptr, query_ptr, bias_ptr, start_ptr, start_lse_ptr = read_ptrs
    out_ptr, lse_ptr, raw_ptr, scale_ptr = out_ptrs
    p, w, dot_s = tl.program_id(0) * SETTINGS.P, tl.arange(0, SETTINGS.WIDTH), tl.arange(0, DOT_READS)
    j, p_c, mask_c = _columns(p, n, positions, SETTINGS)
    s, p_r, mask_r = _rows(p, positions, reads, SETTINGS)
    x_ptrs, flags = rows_of(table_ptr, 0, j, n, SETTINGS.NARROW)
    x_at = (tl.cast(p_c, tl.int64) * SETTINGS.D)[:, None] + w[None, :]
    raw = tl.zeros([DOT_READS, SETTINGS.P * SETTINGS.N], tl.float32)
    squares = tl.zeros([SETTINGS.P * SETTINGS.N, SETTINGS.WIDTH], tl.float32)
    for first in range(0, SETTINGS.D, SETTINGS.WIDTH):
        mask_w = (first + w < SETTINGS.D)[None, :]
        x = load_parts(x_ptrs, flags, x_at + first, mask_c[:, None] & mask_w, SETTINGS.KIND)
        at = dot_s[:, None] * SETTINGS.D + first + w[None, :]
        query = parts_of(load_fp32(query_ptr, at, (dot_s < reads)[:, None] & mask_w), MIXED | SETTINGS.KIND)
        raw = product(query, transposed(x), raw, MIXED | SETTINGS.KIND, SETTINGS.KIND)
        if SETTINGS.EPS is not None:
            exact = whole(x, SETTINGS.KIND)
            squares += exact * exact
    scale = tl.full([SETTINGS.P * SETTINGS.N], 1.0, tl.float32)
    if SETTINGS.EPS is not None:
        scale = tl.rsqrt(tl.sum(squares, axis=1) / SETTINGS.D + SETTINGS.EPS)
    tl.store(scale_ptr + tl.cast(p_c, tl.int64) * n + j, scale, mask_c)
    raw_at = (tl.cast(p_c, tl.int64) * reads)[None, :] + dot_s[:, None]
    tl.store(raw_ptr + raw_at * n + j[None, :], raw, (dot_s < reads)[:, None] & mask_c[None, :])
    bias = tl.load(bias_ptr + j, mask_c & (biased != 0), other=0.0).to(tl.float32)
    score = _of_rows(raw * scale[None, :] + bias[None, :], SETTINGS)
    score = tl.where((p_r[:, None] == p_c[None, :]) & mask_c[None, :], score, float("-inf"))
    lse_at = s * positions + p_r
    # without a start, its share is zero
    start_lse = tl.load(start_lse_ptr + lse_at, mask_r & (started != 0), other=float("-inf")).to(tl.float32)
    top = tl.where(mask_r, tl.maximum(tl.max(score, axis=1), start_lse), 0.0)
    weight, share = tl.exp(score - top[:, None]), tl.exp(start_lse - top)
    total = tl.where(mask_r, tl.sum(weight, axis=1) + share, 1.0)
    tl.store(lse_ptr + lse_at, top + tl.log(total), mask_r)
    share /= total
    weights = parts_of(weight / total[:, None], MIXED | SETTINGS.KIND)
    row_at = (tl.cast(lse_at, tl.int64) * SETTINGS.D)[:, None] + w[None, :]
    for first in range(0, SETTINGS.D, SETTINGS.WIDTH):
        mask_w = (first + w < SETTINGS.D)[None, :]
        x = load_parts(x_ptrs, flags, x_at + first, mask_c[:, None] & mask_w, SETTINGS.KIND)
        mask = mask_r[:, None] & mask_w
        out = load_fp32(start_ptr, row_at + first, mask & (started != 0)) * share[:, None]
        out = product(weights, x, out, MIXED | SETTINGS.KIND, SETTINGS.KIND)
        store_as(out_ptr, row_at + first, out, mask)


@triton.jit
def _of_rows(x_sc, SETTINGS):
    """Return a row for each read of each position; x_sc: a row for each of DOT_READS reads, of which READS count."""
    columns: tl.constexpr = SETTINGS.P * SETTINGS.N
    few, _ = tl.split(tl.permute(tl.reshape(x_sc, (2, READS, columns)), (1, 2, 0)))
    repeated = tl.broadcast_to(few[None, :, :], (SETTINGS.ROWS // READS, READS, columns))
    return tl.reshape(repeated, (SETTINGS.ROWS, columns))


@triton.jit
def _of_reads(x_rc, SETTINGS):
    """Return the sum over the positions for each of DOT_READS reads."""
    columns: tl.constexpr = SETTINGS.P * SETTINGS.N
    few = tl.sum(tl.reshape(x_rc, (SETTINGS.ROWS // READS, READS, columns)), axis=0)
    return tl.reshape(tl.permute(tl.join(few, tl.zeros_like(few)), (2, 0, 1)), (DOT_READS, columns))


@triton.jit(do_not_specialize=COUNTS)
def attention_residuals_backward(
    read_ptrs, grad_ptrs, sum_ptrs, n, positions, reads, rows, started, biased, given_lse, SETTINGS
):
    table_ptr, query_ptr, bias_ptr, start_ptr, start_lse_ptr = read_ptrs
    grad_ptr, grad_lse_ptr, lse_ptr, raw_ptr, scale_ptr = grad_ptrs
    partial_query_ptr, partial_bias_ptr, grad_start_ptr, grad_start_lse_ptr = sum_ptrs
    w, dot_s, program = tl.arange(0, SETTINGS.WIDTH), tl.arange(0, DOT_READS), tl.program_id(0)
    begin = program * rows
    grad_bias = tl.zeros([SETTINGS.P * SETTINGS.N], tl.float32)
    for p in range(begin, min(begin + rows, positions), SETTINGS.P):
        j, p_c, mask_c = _columns(p, n, positions, SETTINGS)
        s, p_r, mask_r = _rows(p, positions, reads, SETTINGS)
        x_ptrs, flags = rows_of(table_ptr, 0, j, n, SETTINGS.NARROW)
        lse_at, x_at = s * positions + p_r, (tl.cast(p_c, tl.int64) * SETTINGS.D)[:, None] + w[None, :]
        row_at = (tl.cast(lse_at, tl.int64) * SETTINGS.D)[:, None] + w[None, :]
        # the products of the sources with the gradients of the outputs
        value = tl.zeros([SETTINGS.ROWS, SETTINGS.P * SETTINGS.N], tl.float32)
        for first in range(0, SETTINGS.D, SETTINGS.WIDTH):
            mask_w = (first + w < SETTINGS.D)[None, :]
            x = load_parts(x_ptrs, flags, x_at + first, mask_c[:, None] & mask_w, SETTINGS.KIND)
            grad = load_fp32(grad_ptr, row_at + first, mask_r[:, None] & mask_w)
            grads = parts_of(grad, SETTINGS.GRAD_KIND)
            value = product(grads, transposed(x), value, SETTINGS.GRAD_KIND, SETTINGS.KIND)
        start_value = tl.zeros([SETTINGS.ROWS], tl.float32)
        for first in range(0, started * SETTINGS.D, SETTINGS.WIDTH):
            mask_rw = mask_r[:, None] & (first + w < SETTINGS.D)[None, :]
            products = load_fp32(grad_ptr, row_at + first, mask_rw) * load_fp32(start_ptr, row_at + first, mask_rw)
            # a product that is added could be fused in one lane only
            start_value += tl.sum(tl.where(mask_rw, products, 0.0), axis=1)
        mask_rc = (p_r[:, None] == p_c[None, :]) & mask_r[:, None] & mask_c[None, :]
        raw_at = ((tl.cast(p_r, tl.int64) * reads + s) * n)[:, None] + j[None, :]
        raw = tl.load(raw_ptr + raw_at, mask_rc, other=0.0)
        scale = tl.load(scale_ptr + tl.cast(p_c, tl.int64) * n + j, mask_c, other=0.0)
        bias = tl.load(bias_ptr + j, mask_c & (biased != 0), other=0.0).to(tl.float32)
        lse = tl.load(lse_ptr + lse_at, mask_r, other=0.0)
        weight = tl.where(mask_rc, tl.exp(raw * scale[None, :] + bias[None, :] - lse[:, None]), 0.0)
        start_lse = tl.load(start_lse_ptr + lse_at, mask_r & (started != 0), other=float("-inf")).to(tl.float32)
        share = tl.exp(start_lse - lse)
        # the term that the gradients of all scores share
        common = tl.sum(weight * value, axis=1) + share * start_value
        common -= load_fp32(grad_lse_ptr, lse_at, mask_r & (given_lse != 0))
        grad_score = weight * (value - common[:, None])
        grad_bias += tl.sum(grad_score, axis=0)
        grad_raw = grad_score * scale[None, :]
        along = tl.zeros([SETTINGS.P * SETTINGS.N], tl.float32)
        if SETTINGS.EPS is not None:
            # the gradient of rms(x) is parallel to x
            along = tl.sum(grad_raw * raw, axis=0) * scale * scale / SETTINGS.D
        if started != 0:
            store_as(grad_start_lse_ptr, lse_at, share * (start_value - common), mask_r)
            for first in range(0, SETTINGS.D, SETTINGS.WIDTH):
                mask_rw = mask_r[:, None] & (first + w < SETTINGS.D)[None, :]
                grad_start = share[:, None] * load_fp32(grad_ptr, row_at + first, mask_rw)
                store_as(grad_start_ptr, row_at + first, grad_start, mask_rw)
        weights = parts_of(weight, MIXED | SETTINGS.KIND)
        grad_raws = parts_of(_of_reads(grad_raw, SETTINGS), MIXED | SETTINGS.KIND)
        sum_at = ((tl.cast(program, tl.int64) * reads + dot_s) * SETTINGS.D)[:, None] + w[None, :]
        grad_x_ptrs, _ = rows_of(table_ptr, 1, j, n, SETTINGS.NARROW)
        for first in range(0, SETTINGS.D, SETTINGS.WIDTH):
            mask_w = (first + w < SETTINGS.D)[None, :]
            mask_x, mask_s = mask_c[:, None] & mask_w, (dot_s < reads)[:, None] & mask_w
            x = load_parts(x_ptrs, flags, x_at + first, mask_x, SETTINGS.KIND)
            grad = load_fp32(grad_ptr, row_at + first, mask_r[:, None] & mask_w)
            query = load_fp32(query_ptr, dot_s[:, None] * SETTINGS.D + first + w[None, :], mask_s)
            grads, queries = parts_of(grad, SETTINGS.GRAD_KIND), parts_of(query, MIXED | SETTINGS.KIND)
            grad_x = tl.zeros([SETTINGS.P * SETTINGS.N, SETTINGS.WIDTH], tl.float32)
            grad_x = product(transposed(weights), grads, grad_x, MIXED | SETTINGS.KIND, SETTINGS.GRAD_KIND)
            grad_x = product(transposed(grad_raws), queries, grad_x, MIXED | SETTINGS.KIND, MIXED | SETTINGS.KIND)
            if SETTINGS.EPS is not None:
                grad_x -= along[:, None] * whole(x, SETTINGS.KIND)
            store_typed(grad_x_ptrs, flags & 1, flags & 2, x_at + first, grad_x, mask_x, SETTINGS.KIND)
            # the sum over the positions of this program
            grad_query = load_fp32(partial_query_ptr, sum_at + first, mask_s & (p > begin))
            grad_query = product(grad_raws, x, grad_query, MIXED | SETTINGS.KIND, SETTINGS.KIND)
            tl.store(partial_query_ptr + sum_at + first, grad_query, mask_s)
        # the sums that one thread stored may be read by others
        tl.debug_barrier()
    c = tl.arange(0, SETTINGS.P * SETTINGS.N)
    j = c % SETTINGS.N
    tl.store(partial_bias_ptr + (program * SETTINGS.P + c // SETTINGS.N) * n + j, grad_bias, j < n)
