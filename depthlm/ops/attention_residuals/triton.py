# mypy: allow-untyped-defs, disable-error-code="assignment"
"""`depth_attend` in Triton. A program has all sources of a position, and up to MAX_READS reads.

For one position, the scores and the outputs of all reads are products of small matrices, [s, d] x [d, n] and
[s, n] x [n, d], so they run on tensor cores. A source is loaded twice forward and twice backward, the second time
mostly from the L2 cache. In the backward pass, the gradients of the outputs and the queries are one matrix of 2 s
rows, so that the products with the sources, and the gradient of a source, take one product each.
One read of at most ADDRESSES sources has its own kernels.

Shapes: s reads, n sources, p positions, d width, r rows: the reads, padded to 8, twice.
"""

from collections.abc import Sequence
from typing import NamedTuple

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
    whole,
)
from depthlm.ops.triton_common import constants, load_fp32, split_work, tl, triton

# values of all sources in a tile, and warps of a program
TILE, WARPS = 8192, 8
# programs of a backward pass, each with its own partial sums
PROGRAMS = 512


class Settings(NamedTuple):
    """Constants of the kernels. D: d. N: n, padded. WIDTH: dimensions of a tile. NARROW: the dtype of 16-bit sources.

    KIND: of the sources, as in `load_parts`.
    """

    D: tl.constexpr
    N: tl.constexpr
    WIDTH: tl.constexpr
    EPS: tl.constexpr
    NARROW: tl.constexpr
    KIND: tl.constexpr


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
    """Return empty lse_sp and scale_pn (1 / rms)."""
    shape, reads = sources[0].shape[:-1], len(parameters[0])
    shapes = (reads, *shape), (shape.numel(), len(sources))
    return [sources[0].new_empty(x, dtype=torch.float32) for x in shapes]


@torch.library.custom_op(operator_name(__name__, "depth_attend"), **FORWARD)
def forward(parameters, sources, start, eps, outputs):
    query, *bias = (aligned(x) for x in parameters)
    out, lse, scale = outputs
    inputs = inputs_of(sources, len(query))
    # without a bias or a start, these pointers are not used
    tensors = inputs.table, query, *(bias or [query]), *([aligned(x) for x in start] or (out, lse)), out, lse, scale
    _launch(_forward, lse.numel() // len(query), inputs, [tensors], int(bool(start)), len(bias), eps=eps)


@torch.library.custom_op(operator_name(__name__, "depth_attend_backward"), **BACKWARD)
def launch_backward(grads, outputs, parameters, sources, start, eps, source_grads, added, sums):
    lse, scale = outputs
    (query, *bias), (grad, *grad_lse), starts = ([aligned(x) for x in y] for y in (parameters, grads, start))
    partial_query, partial_bias, *start_grads = sums
    inputs = inputs_of(sources, len(query), source_grads, added)
    programs, rows = split_work(lse.numel() // len(query), PROGRAMS)
    # without a bias, a gradient of lse or a start, these pointers are not used
    read_ptrs = (
        inputs.table,
        query,
        *(bias or [query]),
        grad,
        *(grad_lse or [lse]),
        lse,
        scale,
        *(starts or (grad, lse)),
    )
    sum_ptrs = partial_query, partial_bias, *(start_grads or (grad, lse))
    flags = int(bool(start)), len(bias), len(grad_lse)
    _launch(_backward, programs, inputs, [read_ptrs, sum_ptrs], rows, *flags, eps=eps)


def backward(inputs: BackwardInputs) -> list[Tensor]:
    (query, *bias), lse = inputs.parameters, inputs.outputs[0]
    programs, _ = split_work(lse[0].numel(), PROGRAMS)
    partial_query = lse.new_empty(programs, *query.shape)
    partial_bias = lse.new_empty(programs, len(inputs.sources))
    start_grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs.start]
    launch_backward(*inputs, [partial_query, partial_bias, *start_grads])
    return [partial_query.sum(0).to(query.dtype), *(partial_bias.sum(0).to(x.dtype) for x in bias), *start_grads]


KERNELS = Kernels("attention_residuals", 2, allocate, forward, backward, saves_start=True)


def _launch(kernel, programs: int, inputs: Inputs, tensors, *numbers, eps: float | None) -> None:
    padded = max(16, triton.next_power_of_2(len(inputs.sources)))
    width = max(16, min(TILE // padded, triton.next_power_of_2(inputs.settings["D"])))
    values = inputs.settings["D"], padded, width, eps, inputs.settings["NARROW"], inputs.kind
    with torch.cuda.device_of(inputs.table):
        kernel[(programs,)](*tensors, *inputs.sizes, *numbers, constants(Settings, *values), num_warps=WARPS)


@triton.jit(do_not_specialize=COUNTS)
def _forward(tensor_ptrs, n, positions, reads, started, biased, SETTINGS):
    table_ptr, query_ptr, bias_ptr, start_ptr, start_lse_ptr, out_ptr, lse_ptr, scale_ptr = tensor_ptrs
    p = tl.program_id(0)
    j, s, c = tl.arange(0, SETTINGS.N), tl.arange(0, DOT_READS), tl.arange(0, SETTINGS.WIDTH)
    x_ptrs, flags = rows_of(table_ptr, 0, j, n, SETTINGS.NARROW)
    at = tl.cast(p, tl.int64) * SETTINGS.D
    raw = tl.zeros([DOT_READS, SETTINGS.N], tl.float32)
    squares = tl.zeros([SETTINGS.N, SETTINGS.WIDTH], tl.float32)
    for first in range(0, SETTINGS.D, SETTINGS.WIDTH):
        mask_c = (first + c < SETTINGS.D)[None, :]
        high, low = load_parts(x_ptrs, flags, at + first + c[None, :], (j < n)[:, None] & mask_c, SETTINGS.KIND)
        query = load_fp32(query_ptr, s[:, None] * SETTINGS.D + first + c[None, :], (s < reads)[:, None] & mask_c)
        raw = product(query, tl.trans(high), tl.trans(low), raw, SETTINGS.KIND)
        if SETTINGS.EPS is not None:
            x = whole(high, low, SETTINGS.KIND)
            squares += x * x
    scale = tl.full([SETTINGS.N], 1.0, tl.float32)
    if SETTINGS.EPS is not None:
        scale = tl.rsqrt(tl.sum(squares, axis=1) / SETTINGS.D + SETTINGS.EPS)
    tl.store(scale_ptr + tl.cast(p, tl.int64) * n + j, scale, j < n)
    bias = tl.load(bias_ptr + j, (j < n) & (biased != 0), other=0.0).to(tl.float32)
    score = tl.where((j < n)[None, :], raw * scale[None, :] + bias[None, :], float("-inf"))
    lse_at, mask_s = s * positions + p, s < reads
    # without a start, its share is zero
    start_lse = tl.load(start_lse_ptr + lse_at, mask_s & (started != 0), other=float("-inf")).to(tl.float32)
    top = tl.maximum(tl.max(score, axis=1), start_lse)
    weight, share = tl.exp(score - top[:, None]), tl.exp(start_lse - top)
    total = tl.sum(weight, axis=1) + share
    tl.store(lse_ptr + lse_at, top + tl.log(total), mask_s)
    weight /= total[:, None]
    share /= total
    row_at = tl.cast(lse_at, tl.int64)[:, None] * SETTINGS.D
    for first in range(0, SETTINGS.D, SETTINGS.WIDTH):
        mask_c = (first + c < SETTINGS.D)[None, :]
        high, low = load_parts(x_ptrs, flags, at + first + c[None, :], (j < n)[:, None] & mask_c, SETTINGS.KIND)
        out_at, mask = row_at + first + c[None, :], mask_s[:, None] & mask_c
        out = load_fp32(start_ptr, out_at, mask & (started != 0)) * share[:, None]
        out = product(weight, high, low, out, SETTINGS.KIND)
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _halves(x_rn):
    """Return the first and the last 8 rows."""
    return tl.split(tl.permute(tl.reshape(x_rn, (2, READS, x_rn.shape[1])), (1, 2, 0)))


@triton.jit
def _stacked(first_sn, last_sn):
    """Return 16 rows, the inverse of `_halves`."""
    return tl.reshape(tl.permute(tl.join(first_sn, last_sn), (2, 0, 1)), (2 * READS, first_sn.shape[1]))


@triton.jit
def _grads_and_queries(grad_ptr, query_ptr, r, p, first, positions, reads, SETTINGS):
    """Load a tile with the gradients of the outputs of all reads, and then their queries."""
    c = first + tl.arange(0, SETTINGS.WIDTH)
    mask_c = (c < SETTINGS.D)[None, :]
    grad_at = tl.cast(r * positions + p, tl.int64)[:, None] * SETTINGS.D + c[None, :]
    grad = load_fp32(grad_ptr, grad_at, (r < reads)[:, None] & mask_c)
    is_query = (r >= READS) & (r < reads + READS)
    return grad + load_fp32(query_ptr, (r - READS)[:, None] * SETTINGS.D + c[None, :], is_query[:, None] & mask_c)


@triton.jit(do_not_specialize=COUNTS)
def _backward(read_ptrs, sum_ptrs, n, positions, reads, rows, started, biased, given_lse, SETTINGS):
    table_ptr, query_ptr, bias_ptr, grad_ptr, grad_lse_ptr, lse_ptr, scale_ptr, start_ptr, start_lse_ptr = read_ptrs
    partial_query_ptr, partial_bias_ptr, grad_start_ptr, grad_start_lse_ptr = sum_ptrs
    j, r, c = tl.arange(0, SETTINGS.N), tl.arange(0, DOT_READS), tl.arange(0, SETTINGS.WIDTH)
    s, is_query, program = tl.arange(0, READS), (r >= READS) & (r < reads + READS), tl.program_id(0)
    x_ptrs, flags = rows_of(table_ptr, 0, j, n, SETTINGS.NARROW)
    grad_x_ptrs, _ = rows_of(table_ptr, 1, j, n, SETTINGS.NARROW)
    bias = tl.load(bias_ptr + j, (j < n) & (biased != 0), other=0.0).to(tl.float32)
    grad_bias = tl.zeros([SETTINGS.N], tl.float32)
    begin = program * rows
    for p in range(begin, min(begin + rows, positions)):
        at, lse_at, mask_s = tl.cast(p, tl.int64) * SETTINGS.D, s * positions + p, s < reads
        # the products of the sources with the gradients of the outputs, and with the queries
        products = tl.zeros([DOT_READS, SETTINGS.N], tl.float32)
        for first in range(0, SETTINGS.D, SETTINGS.WIDTH):
            mask = (j < n)[:, None] & (first + c < SETTINGS.D)[None, :]
            high, low = load_parts(x_ptrs, flags, at + first + c[None, :], mask, SETTINGS.KIND)
            both = _grads_and_queries(grad_ptr, query_ptr, r, p, first, positions, reads, SETTINGS)
            products = product(both, tl.trans(high), tl.trans(low), products, SETTINGS.KIND)
        start_product = tl.zeros([READS], tl.float32)
        for first in range(0, started * SETTINGS.D, SETTINGS.WIDTH):
            start_at = tl.cast(lse_at, tl.int64)[:, None] * SETTINGS.D + first + c[None, :]
            mask = mask_s[:, None] & (first + c < SETTINGS.D)[None, :]
            start_product += tl.sum(load_fp32(grad_ptr, start_at, mask) * load_fp32(start_ptr, start_at, mask), axis=1)
        value, raw = _halves(products)
        scale = tl.load(scale_ptr + tl.cast(p, tl.int64) * n + j, j < n, other=0.0)
        lse = tl.load(lse_ptr + lse_at, mask_s, other=0.0)
        score = raw * scale[None, :] + bias[None, :]
        weight = tl.where((j < n)[None, :] & mask_s[:, None], tl.exp(score - lse[:, None]), 0.0)
        start_lse = tl.load(start_lse_ptr + lse_at, mask_s & (started != 0), other=float("-inf")).to(tl.float32)
        share = tl.exp(start_lse - lse)
        # the term that the gradients of all scores share
        common = tl.sum(weight * value, axis=1) + share * start_product
        common -= tl.load(grad_lse_ptr + lse_at, mask_s & (given_lse != 0), other=0.0).to(tl.float32)
        grad_score = weight * (value - common[:, None])
        grad_bias += tl.sum(grad_score, axis=0)
        grad_raw = grad_score * scale[None, :]
        along = tl.zeros([SETTINGS.N], tl.float32)
        if SETTINGS.EPS is not None:
            # the gradient of rms(x) is parallel to x
            along = tl.sum(grad_raw * raw, axis=0) * scale * scale / SETTINGS.D
        if started != 0:
            grad_start_lse = share * (start_product - common)
            tl.store(grad_start_lse_ptr + lse_at, grad_start_lse.to(grad_start_lse_ptr.dtype.element_ty), mask_s)
            for first in range(0, SETTINGS.D, SETTINGS.WIDTH):
                start_at = tl.cast(lse_at, tl.int64)[:, None] * SETTINGS.D + first + c[None, :]
                mask = mask_s[:, None] & (first + c < SETTINGS.D)[None, :]
                grad_start = share[:, None] * load_fp32(grad_ptr, start_at, mask)
                tl.store(grad_start_ptr + start_at, grad_start.to(grad_start_ptr.dtype.element_ty), mask)
        factors = _stacked(weight, grad_raw)
        sum_ptr = partial_query_ptr + tl.cast(program * reads - READS, tl.int64) * SETTINGS.D
        for first in range(0, SETTINGS.D, SETTINGS.WIDTH):
            mask_c = (first + c < SETTINGS.D)[None, :]
            mask, x_at = (j < n)[:, None] & mask_c, at + first + c[None, :]
            high, low = load_parts(x_ptrs, flags, x_at, mask, SETTINGS.KIND)
            both = _grads_and_queries(grad_ptr, query_ptr, r, p, first, positions, reads, SETTINGS)
            both_high, both_low = parts_of(both, SETTINGS.KIND)
            grad_x = tl.zeros([SETTINGS.N, SETTINGS.WIDTH], tl.float32)
            grad_x = product(tl.trans(factors), both_high, both_low, grad_x, MIXED | SETTINGS.KIND)
            if SETTINGS.EPS is not None:
                grad_x -= along[:, None] * whole(high, low, SETTINGS.KIND)
            store_typed(grad_x_ptrs, flags & 1, flags & 2, x_at, grad_x, mask, SETTINGS.NARROW)
            grad_query = tl.zeros([DOT_READS, SETTINGS.WIDTH], tl.float32)
            grad_query = product(factors, high, low, grad_query, SETTINGS.KIND)
            to_ptr = sum_ptr + r[:, None] * SETTINGS.D + first + c[None, :]
            # the sum over the rows of this program
            grad_query += tl.load(to_ptr, is_query[:, None] & mask_c & (p > begin), other=0.0)
            tl.store(to_ptr, grad_query, is_query[:, None] & mask_c)
        # the sums that one thread stored may be read by others
        tl.debug_barrier()
    tl.store(partial_bias_ptr + program * n + j, grad_bias, j < n)
