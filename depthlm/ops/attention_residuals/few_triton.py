# mypy: allow-untyped-defs, disable-error-code="assignment, misc"
"""`depth_attend` for few sources in Triton.

A warp has one position, and a thread all reads of its columns. So sums over columns stay with a thread until the end of
the row. The gradient of the queries, a sum over positions, has a kernel of its own. The positions of a single read
share a warp, which sums its gradient of the query. Each tensor is loaded twice, the second time from a cache.

Shapes: s reads, n sources, p positions, d width. Tiles are [s, p, LANES, VECTOR].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from depthlm.ops.library import register
from depthlm.ops.reads import BACKWARD, FORWARD, BackwardInputs, Kernels
from depthlm.ops.reads_triton import (
    COUNTS,
    addresses,
    align,
    kind_of,
    load_typed,
    narrow_dtype,
    pointers,
    store_typed,
)
from depthlm.ops.tiles import tiles_of
from depthlm.ops.triton_common import (
    cdiv,
    constants,
    load_fp32,
    next_power_of_2,
    on_device,
    split_work,
    store_as,
    tl,
    triton,
)

# the most sources, which registers limit
FEW_SOURCES = 8
# threads of a warp; with 4 columns each, a row of a tile has 128
LANES, VECTOR = tl.constexpr(32), tl.constexpr(4)
_TILES = tiles_of("attention_residuals_few")
# positions of a program, each of a warp; those of a single read share a warp, which then sums their gradients
POSITIONS = _TILES["POSITIONS"]
# programs over positions of the gradient of the query, each with its own partial sums
PROGRAMS = _TILES["PROGRAMS"]


class Settings(NamedTuple):
    """Constants of the kernels. D: d. READS: s, padded. N: n, padded. P: positions of a tile.

    NARROW: the dtype of 16-bit sources. KIND: of the sources (`load_typed`).
    """

    D: tl.constexpr
    READS: tl.constexpr
    N: tl.constexpr
    P: tl.constexpr
    EPS: tl.constexpr
    NARROW: tl.constexpr
    KIND: tl.constexpr


def kernels_of_few(query_sd: Tensor, num_sources: int, has_start: bool) -> Kernels | None:
    """Return these kernels if they run such reads: a start is supported for a single one."""
    return KERNELS if num_sources <= FEW_SOURCES and (len(query_sd) == 1 or not has_start) else None


def allocate(parameters: list[Tensor], sources: list[Tensor]) -> list[Tensor]:
    """Return empty lse_sp, raw_psn (q . x) and scale_pn (1 / rms)."""
    shape, reads, n = sources[0].shape[:-1], len(parameters[0]), len(sources)
    shapes = (reads, *shape), (shape.numel(), reads, n), (shape.numel(), n)
    return [sources[0].new_empty(x, dtype=torch.float32) for x in shapes]


@register("depth_attend_few", schema=FORWARD)
def forward(parameters, sources, start, eps, outputs):
    query, *bias = (align(x) for x in parameters)
    xs, (out, lse, raw, scale) = [align(x) for x in sources], outputs
    # without a bias or a start, these pointers are not used
    starts = [align(x) for x in start] or (out, lse)
    tensor_ptrs = query, *(bias or [query]), *starts, out, lse, raw, scale
    x_ptrs, _, wide, _ = addresses(xs)
    positions, (settings, warps) = len(scale), _settings(xs, len(query), eps)
    numbers = len(xs), positions, len(query), int(bool(start)), len(bias)
    grid = (cdiv(positions, settings.P.value),)
    with on_device(query):
        attention_residuals_few_forward[grid](x_ptrs, wide, tensor_ptrs, *numbers, settings, num_warps=warps)


@register("depth_attend_few_backward", schema=BACKWARD)
def launch_backward(grads, outputs, parameters, sources, start, eps, source_grads, added, sums):
    (query, *bias), (grad, *grad_lse) = ([align(x) for x in y] for y in (parameters, grads))
    *outs, lse, raw, scale = outputs
    grad_raw, partial_query, *start_grads = sums
    xs = [align(x) for x in sources]
    start_lse = align(start[1]) if start else lse
    read_ptrs = query, *(bias or [query]), grad, *(grad_lse or [lse]), *(outs or [grad]), lse, raw, scale, start_lse
    to_ptrs = grad_raw, partial_query, *(start_grads or (grad, lse))
    sizes, numbers = (len(xs), len(scale), len(query)), (int(bool(start)), len(bias), len(grad_lse))
    settings, warps = _settings(xs, len(query), eps)
    programs, rows = _programs(len(query), len(scale))
    x_ptrs, grad_ptrs, wide, flags = addresses(xs, source_grads, added)
    groups, columns = cdiv(len(scale), settings.P.value), cdiv(settings.D.value, LANES.value * VECTOR.value)
    with on_device(query):
        attention_residuals_few_backward[(groups,)](
            x_ptrs, grad_ptrs, wide, flags, read_ptrs, to_ptrs, *sizes, *numbers, settings, num_warps=warps
        )
        if len(query) > 1:
            attention_residuals_few_query_grad[(columns, programs)](
                x_ptrs, wide, grad_raw, partial_query, *sizes, rows, settings, num_warps=1
            )


def backward(inputs: BackwardInputs) -> list[Tensor]:
    (query, *bias), (raw, scale) = inputs.parameters, inputs.outputs[-2:]
    positions, reads, n = raw.shape
    partial_query = raw.new_empty(_programs(reads, positions)[0], *query.shape)
    grad_raw = raw.new_empty(positions, *_padded_sizes(reads, n))
    # the start of one read has the shapes of its output and lse
    start_grads = [torch.empty_like(y, dtype=x.dtype) for x, y in zip(inputs.start, inputs.outputs, strict=False)]
    launch_backward(*inputs, [grad_raw, partial_query, *start_grads])
    grad_bias = [(grad_raw[:, :reads, :n] / scale[:, None]).sum((0, 1)).to(x.dtype) for x in bias]
    return [partial_query.sum(0).to(query.dtype), *grad_bias, *start_grads]


KERNELS = Kernels("attention_residuals", 2, allocate, forward, backward, saves_out_of_one=True)


def _settings(sources: list[Tensor], reads: int, eps: float | None) -> tuple[Settings, int]:
    """Return the settings, and the warps of a program."""
    sizes = sources[0].shape[-1], *_padded_sizes(reads, len(sources)), POSITIONS
    settings = constants(Settings, *sizes, eps, narrow_dtype(sources), kind_of(sources))
    return settings, 1 if reads == 1 else POSITIONS


def _padded_sizes(reads: int, n: int) -> tuple[int, int]:
    """Return for how many reads and sources a kernel is compiled."""
    return next_power_of_2(reads), n + n % 2 if n > 1 else 1


def _programs(reads: int, positions: int) -> tuple[int, int]:
    """Return the programs over positions of the gradient of the query, and the positions of each."""
    return (cdiv(positions, POSITIONS), POSITIONS) if reads == 1 else split_work(positions, PROGRAMS)


@triton.jit
def _load_sources(ptrs, wide, at, mask, n, SETTINGS):
    """Load a tile [1, p, LANES, VECTOR] of each source as fp32, with 0 for those that a launch lacks of N."""
    xs = ()
    for j in tl.static_range(SETTINGS.N):
        x_ptrs = pointers(tl.cast(ptrs[j], tl.int64), SETTINGS.NARROW)
        xs += (load_typed(x_ptrs, (wide >> j) & 1, at, mask & (j < n), SETTINGS.KIND),)
    return xs


@triton.jit
def _softmax_term(raw, scale, bias_ptr, j, n, biased, SETTINGS):
    """Return a score as [s, p, 1, 1], and -inf for a source that a launch lacks of N."""
    bias = tl.load(bias_ptr + j, (biased != 0) & (j < n), other=0.0).to(tl.float32)
    return tl.where(j < n, raw * scale + bias, float("-inf"))


@triton.jit(do_not_specialize=COUNTS)
def attention_residuals_few_forward(x_ptrs, wide, tensor_ptrs, n, positions, reads, started, biased, SETTINGS):
    query_ptr, bias_ptr, start_ptr, start_lse_ptr, out_ptr, lse_ptr, raw_ptr, scale_ptr = tensor_ptrs
    s = tl.arange(0, SETTINGS.READS)[:, None, None, None]
    p = tl.program_id(0) * SETTINGS.P + tl.arange(0, SETTINGS.P)[None, :, None, None]
    c = tl.arange(0, LANES)[None, None, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, None, :]
    mask_p, at = p < positions, tl.cast(p, tl.int64) * SETTINGS.D + c
    # a copy per position: the warps would share the reads of a tile without positions, and exchange them
    query_at, mask_q = s * SETTINGS.D + c + 0 * p, s < reads
    raws, squares = (), ()
    for _ in tl.static_range(SETTINGS.N):
        raws += (tl.zeros([SETTINGS.READS, SETTINGS.P, LANES, 1], tl.float32),)
        squares += (tl.zeros([1, SETTINGS.P, LANES, 1], tl.float32),)
    for first in range(0, SETTINGS.D, LANES * VECTOR):
        mask_c = first + c < SETTINGS.D
        xs = _load_sources(x_ptrs, wide, at + first, mask_p & mask_c, n, SETTINGS)
        query = load_fp32(query_ptr + first, query_at, mask_q & mask_c)
        more_raws, more_squares = (), ()
        for j in tl.static_range(SETTINGS.N):
            more_raws += (raws[j] + tl.sum(query * xs[j], axis=3, keep_dims=True),)
            more_squares += (squares[j] + tl.sum(xs[j] * xs[j], axis=3, keep_dims=True),)
        raws, squares = more_raws, more_squares
    mask_s = (s < reads) & mask_p
    lse_at = s * positions + p
    # without a start, its share is zero
    start_lse = tl.load(start_lse_ptr + lse_at, mask_s & (started != 0), other=float("-inf")).to(tl.float32)
    scores, top = (), start_lse
    for j in tl.static_range(SETTINGS.N):
        scale = tl.full([1, SETTINGS.P, 1, 1], 1.0, tl.float32)
        if SETTINGS.EPS is not None:
            scale = tl.rsqrt(tl.sum(squares[j], axis=2, keep_dims=True) / SETTINGS.D + SETTINGS.EPS)
        raw = tl.sum(raws[j], axis=2, keep_dims=True)
        tl.store(scale_ptr + tl.cast(p, tl.int64) * n + j, scale, mask_p & (j < n))
        tl.store(raw_ptr + (tl.cast(p, tl.int64) * reads + s) * n + j, raw, mask_s & (j < n))
        scores += (_softmax_term(raw, scale, bias_ptr, j, n, biased, SETTINGS),)
        top = tl.maximum(top, scores[j])
    share = tl.exp(start_lse - top)
    total, weights = share, ()
    for j in tl.static_range(SETTINGS.N):
        weights += (tl.exp(scores[j] - top),)
        total += weights[j]
    tl.store(lse_ptr + lse_at, top + tl.log(total), mask_s)
    normalized = ()
    for j in tl.static_range(SETTINGS.N):
        normalized += (weights[j] / total,)
    row_at = tl.cast(lse_at, tl.int64) * SETTINGS.D + c
    for first in range(0, SETTINGS.D, LANES * VECTOR):
        mask_c = first + c < SETTINGS.D
        xs = _load_sources(x_ptrs, wide, at + first, mask_p & mask_c, n, SETTINGS)
        out = normalized[0] * xs[0]
        for j in tl.static_range(1, SETTINGS.N):
            out += normalized[j] * xs[j]
        if SETTINGS.READS == 1:
            out += share / total * load_fp32(start_ptr, row_at + first, mask_s & mask_c & (started != 0))
        store_as(out_ptr, row_at + first, out, mask_s & mask_c)


@triton.jit(do_not_specialize=COUNTS)
def attention_residuals_few_backward(
    x_ptrs, grad_ptrs, wide, added, read_ptrs, to_ptrs, n, positions, reads, started, biased, given_lse, SETTINGS
):
    query_ptr, bias_ptr, grad_ptr, grad_lse_ptr, out_ptr, lse_ptr, raw_ptr, scale_ptr, start_lse_ptr = read_ptrs
    grad_raw_ptr, partial_ptr, grad_start_ptr, grad_start_lse_ptr = to_ptrs
    s, warp = tl.arange(0, SETTINGS.READS)[:, None, None, None], tl.arange(0, SETTINGS.P)[None, :, None, None]
    p = tl.program_id(0) * SETTINGS.P + warp
    c = tl.arange(0, LANES)[None, None, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, None, :]
    mask_p, at = p < positions, tl.cast(p, tl.int64) * SETTINGS.D + c
    # a copy per position: the warps would share the reads of a tile without positions, and exchange them
    query_at, mask_q = s * SETTINGS.D + c + 0 * p, s < reads
    mask_s, lse_at = (s < reads) & mask_p, s * positions + p
    row_at = tl.cast(lse_at, tl.int64) * SETTINGS.D + c
    # the products of the gradients with the sources, and of one read with its output
    sums, of_out = (), tl.zeros([SETTINGS.READS, SETTINGS.P, LANES, 1], tl.float32)
    for _ in tl.static_range(SETTINGS.N):
        sums += (tl.zeros([SETTINGS.READS, SETTINGS.P, LANES, 1], tl.float32),)
    for first in range(0, SETTINGS.D, LANES * VECTOR):
        mask_c = first + c < SETTINGS.D
        xs = _load_sources(x_ptrs, wide, at + first, mask_p & mask_c, n, SETTINGS)
        grad = load_fp32(grad_ptr, row_at + first, mask_s & mask_c)
        totals = ()
        for j in tl.static_range(SETTINGS.N):
            totals += (sums[j] + tl.sum(grad * xs[j], axis=3, keep_dims=True),)
        sums = totals
        if SETTINGS.READS == 1:
            of_out += tl.sum(grad * load_fp32(out_ptr, row_at + first, mask_s & mask_c), axis=3, keep_dims=True)
    lse = tl.load(lse_ptr + lse_at, mask_s, other=0.0)
    # what the gradients of all scores share; of one read, the rest of it belongs to the start
    common = tl.sum(of_out, axis=2, keep_dims=True)
    weights, products, raws, scales, of_start = (), (), (), (), common
    for j in tl.static_range(SETTINGS.N):
        scales += (tl.load(scale_ptr + tl.cast(p, tl.int64) * n + j, mask_p & (j < n), other=0.0),)
        raws += (tl.load(raw_ptr + (tl.cast(p, tl.int64) * reads + s) * n + j, mask_s & (j < n), other=0.0),)
        score = _softmax_term(raws[j], scales[j], bias_ptr, j, n, biased, SETTINGS)
        weights += (tl.exp(score - lse),)
        products += (tl.sum(sums[j], axis=2, keep_dims=True),)
        if SETTINGS.READS == 1:
            of_start -= weights[j] * products[j]
        else:
            common += weights[j] * products[j]
    common -= load_fp32(grad_lse_ptr, lse_at, mask_s & (given_lse != 0))
    grad_raws, alongs = (), ()
    for j in tl.static_range(SETTINGS.N):
        grad_score = weights[j] * (products[j] - common)
        grad_raws += (grad_score * scales[j],)
        grad_raw_at = (tl.cast(p, tl.int64) * SETTINGS.READS + s) * SETTINGS.N + j
        tl.store(grad_raw_ptr + grad_raw_at, grad_raws[j], mask_p)
        # the gradient of rms(x) is parallel to x
        alongs += (tl.sum(grad_raws[j] * raws[j], axis=0, keep_dims=True) * scales[j] * scales[j] / SETTINGS.D,)
    share = tl.zeros_like(lse)
    if SETTINGS.READS == 1:
        start_lse = tl.load(start_lse_ptr + lse_at, mask_s & (started != 0), other=float("-inf")).to(tl.float32)
        share = tl.exp(start_lse - lse)
        store_as(grad_start_lse_ptr, lse_at, of_start - share * common, mask_s & (started != 0))
    for ahead in range(0, SETTINGS.D, LANES * VECTOR):
        # from the end, which the caches still have
        first = (SETTINGS.D - 1) // (LANES * VECTOR) * (LANES * VECTOR) - ahead
        mask_c = first + c < SETTINGS.D
        xs = _load_sources(x_ptrs, wide, at + first, mask_p & mask_c, n, SETTINGS)
        grad = load_fp32(grad_ptr, row_at + first, mask_s & mask_c)
        query = load_fp32(query_ptr + first, query_at, mask_q & mask_c)
        for j in tl.static_range(SETTINGS.N):
            grad_x = tl.sum(weights[j] * grad, axis=0, keep_dims=True)
            grad_x += tl.sum(grad_raws[j] * query, axis=0, keep_dims=True)
            if SETTINGS.EPS is not None:
                grad_x -= alongs[j] * xs[j]
            grad_x_ptrs = pointers(tl.cast(grad_ptrs[j], tl.int64), SETTINGS.NARROW)
            flags, mask_x = (wide >> j) & 1, mask_p & mask_c & (j < n)
            store_typed(grad_x_ptrs, flags, (added >> j) & 1, at + first, grad_x, mask_x, SETTINGS.KIND)
        if SETTINGS.READS == 1:
            store_as(grad_start_ptr, row_at + first, share * grad, mask_s & mask_c & (started != 0))
            grad_query = grad_raws[0] * xs[0]
            for j in tl.static_range(1, SETTINGS.N):
                grad_query += grad_raws[j] * xs[j]
            to_ptr = partial_ptr + tl.program_id(0) * SETTINGS.D + first
            tl.store(to_ptr + c, tl.sum(grad_query, axis=1, keep_dims=True), mask_c)


@triton.jit(do_not_specialize=COUNTS)
def attention_residuals_few_query_grad(x_ptrs, wide, grad_raw_ptr, partial_ptr, n, positions, reads, rows, SETTINGS):
    # a program has one warp, which needs no sum over warps
    s, lane = tl.arange(0, SETTINGS.READS)[:, None, None], tl.arange(0, LANES)[None, :, None]
    c = tl.program_id(0) * LANES * VECTOR + lane * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    mask_c, first = c < SETTINGS.D, tl.program_id(1) * rows
    grad_query = tl.zeros([SETTINGS.READS, LANES, VECTOR], tl.float32)
    for row in range(first, min(first + rows, positions)):
        p = tl.cast(row, tl.int64)
        xs = _load_sources(x_ptrs, wide, p * SETTINGS.D + c, mask_c, n, SETTINGS)
        for j in tl.static_range(SETTINGS.N):
            # all lanes load the same number, so that no thread exchanges it
            grad_raw_at = s * SETTINGS.N + j + 0 * lane
            grad_query += tl.load(grad_raw_ptr + p * (SETTINGS.READS * SETTINGS.N) + grad_raw_at) * xs[j]
    to_ptr = partial_ptr + (tl.program_id(1) * reads + s) * SETTINGS.D + c
    tl.store(to_ptr, grad_query, (s < reads) & mask_c)
