# mypy: allow-untyped-defs, disable-error-code="assignment"
"""`gated_reads` in Triton.

A first kernel computes all scores w . x. Then each program of the forward pass computes a tile of the output for all
reads. The backward pass computes the gradients of the scores, for which it needs all dimensions, and then those of the
sources, of b and of w. The number of reads is a constant and those that a launch lacks are masked, since a
branch would delay the loads of the next read.

Shapes: s reads, n sources, p positions, d width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthlm.ops.backend import expect
from depthlm.ops.library import register
from depthlm.ops.reads import BACKWARD, FORWARD, MAX_READS, BackwardInputs, Kernels, read
from depthlm.ops.reads_triton import (
    COUNTS,
    DOT_READS,
    ROWS,
    WIDTH,
    aligned,
    inputs_of,
    load_reads,
    load_source,
    store_grad,
    store_reads,
    tile_at,
    tile_of_program,
)
from depthlm.ops.triton_common import cdiv, load_fp32, split_work, tl, triton

# sources of a program of `dca_score_grads`; sources and reads of one of `dca_bias_grads`, which has a sum for each pair
SCORE_SOURCES, SOURCES, FEW_READS = tl.constexpr(2), tl.constexpr(3), tl.constexpr(3)
# positions of a tile of a matrix product; of one beside many others in registers
DOT_ROWS, HALF_ROWS, WARPS = tl.constexpr(64), tl.constexpr(16), 4
# programs over positions of the gradients of parameters, each with its own partial sums
PROGRAMS = 64


def gated(b_snd: Tensor, w_snd: Tensor, sources: Sequence[Tensor], start_spd: Tensor | None = None) -> Tensor:
    """Run `gated_reads`. Raises: ValueError for a wrong shape or device, TypeError for a wrong dtype."""
    shape = (len(b_snd), len(sources), sources[0].shape[-1])
    expect("dca", b_snd, bias=(b_snd, shape), gate=(w_snd, shape))
    return read(KERNELS, [b_snd, w_snd], sources, [] if start_spd is None else [start_spd])[0]


def allocate(parameters: list[Tensor], sources: list[Tensor]) -> list[Tensor]:
    """Return an empty score_nsp."""
    b, x = parameters[0], sources[0]
    return [b.new_empty(len(sources), len(b), x.shape[:-1].numel(), dtype=torch.float32)]


@register(__name__, "gated_reads", schema=FORWARD)
def forward(parameters, sources, start, eps, outputs):
    b, w = (aligned(x) for x in parameters)
    out, score = outputs
    inputs = inputs_of(sources, len(b))
    n, positions, reads = inputs.sizes
    grid = cdiv(positions, DOT_ROWS.value), n
    inputs.launch(dca_scores, grid, WARPS, [inputs.table, w, score])
    # without a start, its pointer is not used
    begin = aligned(start[0]) if start else out
    inputs.launch(
        dca_forward, inputs.tiles, WARPS, [(inputs.table, b, score), begin, out], len(start), COUNT=_count(reads)
    )


@register(__name__, "gated_reads_backward", schema=BACKWARD)
def launch_backward(grads, outputs, parameters, sources, start, eps, source_grads, added, sums):
    b, w, grad = (aligned(x) for x in (*parameters, *grads))
    (score,), (partial,) = outputs, sums
    inputs, grad_score = inputs_of(sources, len(b), source_grads, added), torch.empty_like(score)
    n, positions, reads = inputs.sizes
    (programs, rows), columns = _programs(positions), inputs.tiles[1]
    read_ptrs = grad, inputs.table, b, score, grad_score
    grid = cdiv(positions, HALF_ROWS.value), cdiv(n, SCORE_SOURCES.value)
    inputs.launch(dca_score_grads, grid, WARPS, [read_ptrs], COUNT=_count(reads))
    inputs.launch(dca_source_grads, inputs.tiles, WARPS, [read_ptrs, w], COUNT=_count(reads))
    grid = cdiv(n, SOURCES.value) * cdiv(reads, FEW_READS.value), columns, programs
    inputs.launch(dca_bias_grads, grid, WARPS, [read_ptrs[:4], partial[0]], rows)
    grid, tensors = (n, columns, programs), [inputs.table, grad_score, partial[1]]
    inputs.launch(dca_gate_grads, grid, WARPS, tensors, rows)


def backward(inputs: BackwardInputs) -> list[Tensor]:
    (reads, n, d), positions = inputs.parameters[0].shape, inputs.sources[0].shape[:-1].numel()
    partial = inputs.grads[0].new_empty(2, _programs(positions)[0], reads, n, d, dtype=torch.float32)
    launch_backward(*inputs, [partial])
    of_parameters = zip(partial.sum(1), inputs.parameters, strict=True)
    return [*(x.to(y.dtype) for x, y in of_parameters), *(inputs.grads[0].to(x.dtype) for x in inputs.start)]


KERNELS = Kernels("dca", 1, allocate, forward, backward)


def _programs(positions: int) -> tuple[int, int]:
    """Return the programs over positions of the gradients of parameters, and the positions of each."""
    return split_work(positions, PROGRAMS, HALF_ROWS.value)


def _count(reads: int) -> int:
    """Return for how many reads a kernel is compiled. Those of two layers, or fewer, take the same version."""
    return 6 if reads <= 6 else MAX_READS


@triton.jit
def _of_dimensions(ptr, s, j, n, c, reads, D: tl.constexpr):
    """Load a row [1, c] of b or w."""
    return load_fp32(ptr, (s * n + j) * D + c, (c < D) & (s < reads))[None, :]


@triton.jit
def _of_positions(ptr, s, j, p, positions, reads):
    """Load a column [p, 1] of scores or of their gradients."""
    return load_fp32(ptr, (j * reads + s) * positions + p, (p < positions) & (s < reads))[:, None]


@triton.jit
def _gate(b_ptr, score_ptr, s, j, n, p, c, positions, reads, D: tl.constexpr):
    """Return what a gate is where it is above 0; elsewhere the gate is closed."""
    return _of_dimensions(b_ptr, s, j, n, c, reads, D) + _of_positions(score_ptr, s, j, p, positions, reads)


@triton.jit(do_not_specialize=COUNTS)
def dca_scores(table_ptr, w_ptr, score_ptr, n, positions, reads, D: tl.constexpr, NARROW: tl.constexpr):
    j = tl.program_id(1)
    p, s = tl.program_id(0) * DOT_ROWS + tl.arange(0, DOT_ROWS), tl.arange(0, DOT_READS)
    score = tl.zeros([DOT_ROWS, DOT_READS], tl.float32)
    for first in range(0, D, WIDTH):
        c = first + tl.arange(0, WIDTH)
        at, mask = tile_at(p, c, positions, D)
        x = load_source(table_ptr, j, at, mask, NARROW)
        w = load_fp32(w_ptr, (s * n + j)[:, None] * D + c[None, :], (s < reads)[:, None] & (c < D)[None, :])
        # an error of a score opens or closes gates, and a gate is all or nothing in the gradient of b
        score = tl.dot(x, tl.trans(w), score, input_precision="tf32x3")
    at = (j * reads + s)[None, :] * positions + p[:, None]
    tl.store(score_ptr + at, score, (s < reads)[None, :] & (p < positions)[:, None])


@triton.jit(do_not_specialize=COUNTS)
def dca_forward(
    read_ptrs,
    start_ptr,
    out_ptr,
    n,
    positions,
    reads,
    started,
    D: tl.constexpr,
    NARROW: tl.constexpr,
    COUNT: tl.constexpr,
):
    table_ptr, b_ptr, score_ptr = read_ptrs
    p, c, at, mask = tile_of_program(positions, D, ROWS)
    out = load_reads(start_ptr, at, mask & (started != 0), positions, reads, D, COUNT)
    for j in range(n):
        x = load_source(table_ptr, j, at, mask, NARROW)
        sums = ()
        for s in tl.static_range(COUNT):
            sums += (out[s] + tl.maximum(_gate(b_ptr, score_ptr, s, j, n, p, c, positions, reads, D), 0.0) * x,)
        out = sums
    store_reads(out_ptr, at, out, mask, positions, reads, D, COUNT)


@triton.jit(do_not_specialize=COUNTS)
def dca_score_grads(read_ptrs, n, positions, reads, D: tl.constexpr, NARROW: tl.constexpr, COUNT: tl.constexpr):
    grad_ptr, table_ptr, b_ptr, score_ptr, grad_score_ptr = read_ptrs
    p = tl.program_id(0) * HALF_ROWS + tl.arange(0, HALF_ROWS)
    begin = tl.program_id(1) * SCORE_SOURCES
    sums = ()
    for _ in tl.static_range(SCORE_SOURCES * COUNT):
        sums += (tl.zeros([HALF_ROWS], tl.float32),)
    for first in range(0, D, WIDTH):
        c = first + tl.arange(0, WIDTH)
        at, mask = tile_at(p, c, positions, D)
        grad, totals = load_reads(grad_ptr, at, mask, positions, reads, D, COUNT), ()
        for k in tl.static_range(SCORE_SOURCES):
            # what is computed again for the last source is not stored
            j = min(begin + k, n - 1)
            x = load_source(table_ptr, j, at, mask, NARROW)
            for s in tl.static_range(COUNT):
                is_open = _gate(b_ptr, score_ptr, s, j, n, p, c, positions, reads, D) > 0.0
                totals += (sums[k * COUNT + s] + tl.sum(tl.where(is_open, grad[s] * x, 0.0), axis=1),)
        sums = totals
    for k in tl.static_range(SCORE_SOURCES):
        for s in tl.static_range(COUNT):
            at = ((begin + k) * reads + s) * positions + p
            tl.store(grad_score_ptr + at, sums[k * COUNT + s], (p < positions) & (begin + k < n) & (s < reads))


@triton.jit(do_not_specialize=COUNTS)
def dca_source_grads(read_ptrs, w_ptr, n, positions, reads, D: tl.constexpr, NARROW: tl.constexpr, COUNT: tl.constexpr):
    grad_ptr, table_ptr, b_ptr, score_ptr, grad_score_ptr = read_ptrs
    p, c, at, mask = tile_of_program(positions, D, ROWS)
    grad = load_reads(grad_ptr, at, mask, positions, reads, D, COUNT)
    for j in range(n):
        grad_x = tl.zeros([ROWS, WIDTH], tl.float32)
        for s in tl.static_range(COUNT):
            grad_x += tl.maximum(_gate(b_ptr, score_ptr, s, j, n, p, c, positions, reads, D), 0.0) * grad[s]
            grad_score = _of_positions(grad_score_ptr, s, j, p, positions, reads)
            grad_x += grad_score * _of_dimensions(w_ptr, s, j, n, c, reads, D)
        store_grad(table_ptr, j, at, grad_x, mask, NARROW)


@triton.jit(do_not_specialize=COUNTS)
def dca_bias_grads(read_ptrs, partial_ptr, n, positions, reads, rows, D: tl.constexpr, NARROW: tl.constexpr):
    grad_ptr, table_ptr, b_ptr, score_ptr = read_ptrs
    # groups of reads are next to each other, so that a source is loaded from memory for only one of them
    groups = tl.cdiv(reads, FEW_READS)
    first_s, first_j = tl.program_id(0) % groups * FEW_READS, tl.program_id(0) // groups * SOURCES
    c, sums = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH), ()
    for _ in tl.static_range(FEW_READS * SOURCES):
        sums += (tl.zeros([HALF_ROWS, WIDTH], tl.float32),)
    first = tl.program_id(2) * rows
    for row in range(first, min(first + rows, positions), HALF_ROWS):
        p = row + tl.arange(0, HALF_ROWS)
        at, mask = tile_at(p, c, positions, D)
        xs, totals = (), ()
        for k in tl.static_range(SOURCES):
            # what is computed again for the last source, or for the last read, is not stored
            xs += (load_source(table_ptr, min(first_j + k, n - 1), at, mask, NARROW),)
        for s in tl.static_range(FEW_READS):
            read = min(first_s + s, reads - 1)
            grad = load_fp32(grad_ptr, tl.cast(positions, tl.int64) * (read * D) + at, mask)
            for k in tl.static_range(SOURCES):
                j = min(first_j + k, n - 1)
                is_open = _gate(b_ptr, score_ptr, read, j, n, p, c, positions, reads, D) > 0.0
                totals += (sums[s * SOURCES + k] + tl.where(is_open, grad * xs[k], 0.0),)
        sums = totals
    partial_ptr += tl.program_id(2) * tl.cast(reads * n, tl.int64) * D
    for s in tl.static_range(FEW_READS):
        for k in tl.static_range(SOURCES):
            at, kept = ((first_s + s) * n + first_j + k) * D + c, (first_s + s < reads) & (first_j + k < n)
            tl.store(partial_ptr + at, tl.sum(sums[s * SOURCES + k], axis=0), (c < D) & kept)


@triton.jit(do_not_specialize=COUNTS)
def dca_gate_grads(
    table_ptr, grad_score_ptr, partial_ptr, n, positions, reads, rows, D: tl.constexpr, NARROW: tl.constexpr
):
    j, c = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    s, grad_w = tl.arange(0, DOT_READS), tl.zeros([DOT_READS, WIDTH], tl.float32)
    first = tl.program_id(2) * rows
    end = min(first + rows, positions)
    for row in range(first, end, ROWS):
        p = row + tl.arange(0, ROWS)
        at, mask = tile_at(p, c, end, D)
        x = load_source(table_ptr, j, at, mask, NARROW)
        score_at = (j * reads + s)[:, None] * positions + p[None, :]
        grad_score = tl.load(grad_score_ptr + score_at, (s < reads)[:, None] & (p < end)[None, :], other=0.0)
        grad_w = tl.dot(grad_score, x, grad_w, input_precision="tf32x3")
    partial_ptr += tl.program_id(2) * tl.cast(reads * n, tl.int64) * D
    tl.store(partial_ptr + ((s * n + j) * D)[:, None] + c[None, :], grad_w, (s < reads)[:, None] & (c < D)[None, :])
