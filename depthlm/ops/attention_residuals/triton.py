# mypy: allow-untyped-defs, disable-error-code="assignment"
"""`depth_attend` in Triton. A program has all sources of a position, and up to MAX_READS reads.

Scores and outputs are matrix products on tensor cores. A source is loaded twice forward and twice backward, the second
time mostly from the L2 cache. Few sources have kernels of their own (`few_triton.py`).

Shapes: s reads, n sources, d width; p positions, or the one of a program.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from depthlm.ops.attention_residuals.few_triton import allocate, kernels_of_few
from depthlm.ops.backend import expect
from depthlm.ops.depth_reduce import source_scores
from depthlm.ops.library import register
from depthlm.ops.reads import BACKWARD, FORWARD, BackwardInputs, Kernels, read
from depthlm.ops.reads_triton import (
    BFLOAT16,
    COUNTS,
    DOT_READS,
    MIXED,
    Inputs,
    align,
    inputs_of,
    load_parts,
    parts_of,
    product,
    rows_of,
    store_typed,
    transposed,
    whole,
)
from depthlm.ops.tiles import tiles_of
from depthlm.ops.triton_common import constants, load_fp32, on_device, split_work, store_as, tl, triton

# the padded numbers of sources for which the kernels are compiled; more than that are read in turns
MEDIUM_SOURCES, MANY_SOURCES = 32, 64
_TILES = tiles_of("attention_residuals")
# dimensions of a tile, and warps of a program; those of a backward pass with MEDIUM_SOURCES
WIDTH, WARPS, MEDIUM_WARPS = _TILES["WIDTH"], _TILES["WARPS"], _TILES["MEDIUM_WARPS"]
# programs of a backward pass, each with its own partial sums
PROGRAMS = _TILES["PROGRAMS"]


class Settings(NamedTuple):
    """Constants of the kernels. D: d. N: n, padded. WIDTH: of a tile. NARROW: the dtype of 16-bit sources.

    KIND, GRAD_KIND: of the sources and of the gradients (`load_parts`).
    """

    D: tl.constexpr
    N: tl.constexpr
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
        kernels = kernels_of_few(query_sd, len(xs), bool(result)) or KERNELS
        result = read(kernels, [query_sd], xs, result, eps, shared)
    out_spd, lse_sp = result
    return out_spd, lse_sp


def _settings(inputs: Inputs, eps: float | None, grad: Tensor | None = None) -> Settings:
    """Return the constants of a kernel; grad: the gradients of the outputs."""
    d, narrow, kind = (x.value for x in inputs.settings)
    padded = MEDIUM_SOURCES if inputs.sizes[0] <= MEDIUM_SOURCES else MANY_SOURCES
    # registers limit a tile
    halved = kind != BFLOAT16.value or (grad is not None and padded > MEDIUM_SOURCES)
    # the gradients of bf16 sources are in fp32 if the start was
    grad_kind = kind if grad is None or grad.dtype == torch.bfloat16 else MIXED.value | kind
    return constants(Settings, d, padded, WIDTH // 2 if halved else WIDTH, eps, narrow, kind, grad_kind)


@register("depth_attend", schema=FORWARD)
def forward(parameters, sources, start, eps, outputs):
    query, *bias = (align(x) for x in parameters)
    out, lse, raw, scale = outputs
    inputs = inputs_of(sources, len(query))
    # without a bias or a start, these pointers are not used
    read_ptrs = inputs.table, query, *(bias or [query]), *([align(x) for x in start] or (out, lse))
    settings, numbers = _settings(inputs, eps), (*inputs.sizes, int(bool(start)), len(bias))
    grid = (inputs.sizes[1],)
    with on_device(query):
        attention_residuals_forward[grid](read_ptrs, (out, lse, raw, scale), *numbers, settings, num_warps=WARPS)


@register("depth_attend_backward", schema=BACKWARD)
def launch_backward(grads, outputs, parameters, sources, start, eps, source_grads, added, sums):
    lse, raw, scale = outputs
    (query, *bias), (grad, *grad_lse), starts = ([align(x) for x in y] for y in (parameters, grads, start))
    partial_query, partial_bias, *start_grads = sums
    inputs = inputs_of(sources, len(query), source_grads, added)
    programs, rows = split_work(inputs.sizes[1], PROGRAMS)
    # without a bias, a gradient of lse or a start, these pointers are not used
    read_ptrs = inputs.table, query, *(bias or [query]), *(starts or (grad, lse))
    grad_ptrs = grad, *(grad_lse or [lse]), lse, raw, scale
    sum_ptrs = partial_query, partial_bias, *(start_grads or (grad, lse))
    numbers = *inputs.sizes, rows, int(bool(start)), len(bias), len(grad_lse)
    settings = _settings(inputs, eps, grad)
    warps = MEDIUM_WARPS if settings.N.value == MEDIUM_SOURCES else WARPS
    with on_device(query):
        attention_residuals_backward[(programs,)](read_ptrs, grad_ptrs, sum_ptrs, *numbers, settings, num_warps=warps)


def backward(inputs: BackwardInputs) -> list[Tensor]:
    (query, *bias), lse, n = inputs.parameters, inputs.outputs[0], len(inputs.sources)
    programs, _ = split_work(lse[0].numel(), PROGRAMS)
    partial_query, partial_bias = lse.new_empty(programs, *query.shape), lse.new_empty(programs, n)
    start_grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs.start]
    launch_backward(*inputs, [partial_query, partial_bias, *start_grads])
    grad_bias = [partial_bias.sum(0).to(x.dtype) for x in bias]
    return [partial_query.sum(0).to(query.dtype), *grad_bias, *start_grads]


KERNELS = Kernels("attention_residuals", 2, allocate, forward, backward, saves_start=True)


@triton.jit(do_not_specialize=COUNTS)
def attention_residuals_forward(read_ptrs, out_ptrs, n, positions, reads, started, biased, SETTINGS):
    table_ptr, query_ptr, bias_ptr, start_ptr, start_lse_ptr = read_ptrs
    out_ptr, lse_ptr, raw_ptr, scale_ptr = out_ptrs
    p, w = tl.cast(tl.program_id(0), tl.int64), tl.arange(0, SETTINGS.WIDTH)
    s, j = tl.arange(0, DOT_READS), tl.arange(0, SETTINGS.N)
    mask_s, mask_j = s < reads, j < n
    x_ptrs, flags = rows_of(table_ptr, 0, j, n, SETTINGS.NARROW)
    x_at = p * SETTINGS.D + w[None, :]
    raw = tl.zeros([DOT_READS, SETTINGS.N], tl.float32)
    squares = tl.zeros([SETTINGS.N, SETTINGS.WIDTH], tl.float32)
    for first in range(0, SETTINGS.D, SETTINGS.WIDTH):
        mask_w = (first + w < SETTINGS.D)[None, :]
        x = load_parts(x_ptrs, flags, x_at + first, mask_j[:, None] & mask_w, SETTINGS.KIND)
        at = s[:, None] * SETTINGS.D + first + w[None, :]
        query = parts_of(load_fp32(query_ptr, at, mask_s[:, None] & mask_w), MIXED | SETTINGS.KIND)
        raw = product(query, transposed(x), raw, MIXED | SETTINGS.KIND, SETTINGS.KIND)
        if SETTINGS.EPS is not None:
            exact = whole(x, SETTINGS.KIND)
            squares += exact * exact
    scale = tl.full([SETTINGS.N], 1.0, tl.float32)
    if SETTINGS.EPS is not None:
        scale = tl.rsqrt(tl.sum(squares, axis=1) / SETTINGS.D + SETTINGS.EPS)
    tl.store(scale_ptr + p * n + j, scale, mask_j)
    mask_sj = mask_s[:, None] & mask_j[None, :]
    tl.store(raw_ptr + ((p * reads + s) * n)[:, None] + j[None, :], raw, mask_sj)
    bias = tl.load(bias_ptr + j, mask_j & (biased != 0), other=0.0).to(tl.float32)
    score = tl.where(mask_sj, raw * scale[None, :] + bias[None, :], float("-inf"))
    lse_at = s * positions + p
    # without a start, its share is zero
    start_lse = tl.load(start_lse_ptr + lse_at, mask_s & (started != 0), other=float("-inf")).to(tl.float32)
    top = tl.where(mask_s, tl.maximum(tl.max(score, axis=1), start_lse), 0.0)
    weight, share = tl.exp(score - top[:, None]), tl.exp(start_lse - top)
    total = tl.where(mask_s, tl.sum(weight, axis=1) + share, 1.0)
    tl.store(lse_ptr + lse_at, top + tl.log(total), mask_s)
    share /= total
    weights = parts_of(weight / total[:, None], MIXED | SETTINGS.KIND)
    row_at = (lse_at * SETTINGS.D)[:, None] + w[None, :]
    for first in range(0, SETTINGS.D, SETTINGS.WIDTH):
        mask_w = (first + w < SETTINGS.D)[None, :]
        x = load_parts(x_ptrs, flags, x_at + first, mask_j[:, None] & mask_w, SETTINGS.KIND)
        mask = mask_s[:, None] & mask_w
        out = load_fp32(start_ptr, row_at + first, mask & (started != 0)) * share[:, None]
        out = product(weights, x, out, MIXED | SETTINGS.KIND, SETTINGS.KIND)
        store_as(out_ptr, row_at + first, out, mask)


@triton.jit(do_not_specialize=COUNTS)
def attention_residuals_backward(
    read_ptrs, grad_ptrs, sum_ptrs, n, positions, reads, rows, started, biased, given_lse, SETTINGS
):
    table_ptr, query_ptr, bias_ptr, start_ptr, start_lse_ptr = read_ptrs
    grad_ptr, grad_lse_ptr, lse_ptr, raw_ptr, scale_ptr = grad_ptrs
    partial_query_ptr, partial_bias_ptr, grad_start_ptr, grad_start_lse_ptr = sum_ptrs
    w, s, j = tl.arange(0, SETTINGS.WIDTH), tl.arange(0, DOT_READS), tl.arange(0, SETTINGS.N)
    mask_s, mask_j, program = s < reads, j < n, tl.program_id(0)
    mask_sj, begin = mask_s[:, None] & mask_j[None, :], program * rows
    x_ptrs, flags = rows_of(table_ptr, 0, j, n, SETTINGS.NARROW)
    grad_x_ptrs, _ = rows_of(table_ptr, 1, j, n, SETTINGS.NARROW)
    grad_bias = tl.zeros([SETTINGS.N], tl.float32)
    for row in range(begin, min(begin + rows, positions)):
        p = tl.cast(row, tl.int64)
        lse_at, x_at = s * positions + p, p * SETTINGS.D + w[None, :]
        row_at = (lse_at * SETTINGS.D)[:, None] + w[None, :]
        # the products of the sources with the gradients of the outputs
        value = tl.zeros([DOT_READS, SETTINGS.N], tl.float32)
        for first in range(0, SETTINGS.D, SETTINGS.WIDTH):
            mask_w = (first + w < SETTINGS.D)[None, :]
            x = load_parts(x_ptrs, flags, x_at + first, mask_j[:, None] & mask_w, SETTINGS.KIND)
            grad = load_fp32(grad_ptr, row_at + first, mask_s[:, None] & mask_w)
            grads = parts_of(grad, SETTINGS.GRAD_KIND)
            value = product(grads, transposed(x), value, SETTINGS.GRAD_KIND, SETTINGS.KIND)
        start_value = tl.zeros([DOT_READS], tl.float32)
        for first in range(0, started * SETTINGS.D, SETTINGS.WIDTH):
            mask_sw = mask_s[:, None] & (first + w < SETTINGS.D)[None, :]
            products = load_fp32(grad_ptr, row_at + first, mask_sw) * load_fp32(start_ptr, row_at + first, mask_sw)
            # a product that is added could be fused in one lane only
            start_value += tl.sum(tl.where(mask_sw, products, 0.0), axis=1)
        raw = tl.load(raw_ptr + ((p * reads + s) * n)[:, None] + j[None, :], mask_sj, other=0.0)
        scale = tl.load(scale_ptr + p * n + j, mask_j, other=0.0)
        bias = tl.load(bias_ptr + j, mask_j & (biased != 0), other=0.0).to(tl.float32)
        lse = tl.load(lse_ptr + lse_at, mask_s, other=0.0)
        weight = tl.where(mask_sj, tl.exp(raw * scale[None, :] + bias[None, :] - lse[:, None]), 0.0)
        start_lse = tl.load(start_lse_ptr + lse_at, mask_s & (started != 0), other=float("-inf")).to(tl.float32)
        share = tl.exp(start_lse - lse)
        # the term that the gradients of all scores share
        common = tl.sum(weight * value, axis=1) + share * start_value
        common -= load_fp32(grad_lse_ptr, lse_at, mask_s & (given_lse != 0))
        grad_score = weight * (value - common[:, None])
        grad_bias += tl.sum(grad_score, axis=0)
        grad_raw = grad_score * scale[None, :]
        along = tl.zeros([SETTINGS.N], tl.float32)
        if SETTINGS.EPS is not None:
            # the gradient of rms(x) is parallel to x
            along = tl.sum(grad_raw * raw, axis=0) * scale * scale / SETTINGS.D
        if started != 0:
            store_as(grad_start_lse_ptr, lse_at, share * (start_value - common), mask_s)
            for first in range(0, SETTINGS.D, SETTINGS.WIDTH):
                mask_sw = mask_s[:, None] & (first + w < SETTINGS.D)[None, :]
                grad_start = share[:, None] * load_fp32(grad_ptr, row_at + first, mask_sw)
                store_as(grad_start_ptr, row_at + first, grad_start, mask_sw)
        weights = parts_of(weight, MIXED | SETTINGS.KIND)
        grad_raws = parts_of(grad_raw, MIXED | SETTINGS.KIND)
        sum_at = ((tl.cast(program, tl.int64) * reads + s) * SETTINGS.D)[:, None] + w[None, :]
        for first in range(0, SETTINGS.D, SETTINGS.WIDTH):
            mask_w = (first + w < SETTINGS.D)[None, :]
            mask_x, mask_sw = mask_j[:, None] & mask_w, mask_s[:, None] & mask_w
            x = load_parts(x_ptrs, flags, x_at + first, mask_x, SETTINGS.KIND)
            grad = load_fp32(grad_ptr, row_at + first, mask_sw)
            query = load_fp32(query_ptr, s[:, None] * SETTINGS.D + first + w[None, :], mask_sw)
            grads, queries = parts_of(grad, SETTINGS.GRAD_KIND), parts_of(query, MIXED | SETTINGS.KIND)
            grad_x = tl.zeros([SETTINGS.N, SETTINGS.WIDTH], tl.float32)
            grad_x = product(transposed(weights), grads, grad_x, MIXED | SETTINGS.KIND, SETTINGS.GRAD_KIND)
            grad_x = product(transposed(grad_raws), queries, grad_x, MIXED | SETTINGS.KIND, MIXED | SETTINGS.KIND)
            if SETTINGS.EPS is not None:
                grad_x -= along[:, None] * whole(x, SETTINGS.KIND)
            store_typed(grad_x_ptrs, flags & 1, flags & 2, x_at + first, grad_x, mask_x, SETTINGS.KIND)
            # the sum over the positions of this program
            grad_query = load_fp32(partial_query_ptr, sum_at + first, mask_sw & (row > begin))
            grad_query = product(grad_raws, x, grad_query, MIXED | SETTINGS.KIND, SETTINGS.KIND)
            tl.store(partial_query_ptr + sum_at + first, grad_query, mask_sw)
        # the sums that one thread stored may be read by others
        tl.debug_barrier()
    tl.store(partial_bias_ptr + program * n + j, grad_bias, mask_j)
