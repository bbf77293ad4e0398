# mypy: allow-untyped-defs, disable-error-code="assignment"
"""`gated_reads` in Triton.

A first kernel computes all scores w . x. Then each program of the forward pass computes a tile of the output for all
reads. The backward pass computes the gradients of the scores, for which it needs all dimensions, and of b, and then
those of the sources and of w. The number of reads is a constant and those that a launch lacks are masked, since a
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
    align,
    inputs_of,
    load_reads,
    load_source,
    load_typed,
    rows_of,
    store_grad,
    store_reads,
    tile_at,
    tile_of_program,
)
from depthlm.ops.tiles import tiles_of
from depthlm.ops.triton_common import cdiv, load_fp32, split_work, tl, triton

# reads and sources of a program of `dca_score_bias_grads`, a source per warp; positions of a thread and of a warp
FEW_READS, SOURCES, STEPS, LANES = tl.constexpr(2), tl.constexpr(4), tl.constexpr(16), tl.constexpr(4)
# columns of its tiles: 128 bytes of an fp32 tensor
COLUMNS = tl.constexpr(32)
_TILES = tiles_of("dca")
# positions of a tile of a matrix product, and warps of a program
DOT_ROWS, WARPS = tl.constexpr(_TILES["DOT_ROWS"]), _TILES["WARPS"]
# the most programs over positions of the gradients of parameters, each with its own partial sums; of few sources and
# reads so many that `dca_score_bias_grads` has ALL_PROGRAMS
PROGRAMS, ALL_PROGRAMS = _TILES["PROGRAMS"], _TILES["ALL_PROGRAMS"]


def gated(b_snd: Tensor, w_snd: Tensor, sources: Sequence[Tensor], start_spd: Tensor | None = None) -> Tensor:
    """Run `gated_reads`. Raises: ValueError for a wrong shape or device, TypeError for a wrong dtype."""
    shape = (len(b_snd), len(sources), sources[0].shape[-1])
    expect("dca", b_snd, bias=(b_snd, shape), gate=(w_snd, shape))
    return read(KERNELS, [b_snd, w_snd], sources, [] if start_spd is None else [start_spd])[0]


def allocate(parameters: list[Tensor], sources: list[Tensor]) -> list[Tensor]:
    """Return an empty score_nsp."""
    b, x = parameters[0], sources[0]
    return [b.new_empty(len(sources), len(b), x.shape[:-1].numel(), dtype=torch.float32)]


@register("gated_reads", schema=FORWARD)
def forward(parameters, sources, start, eps, outputs):
    b, w = (align(x) for x in parameters)
    out, score = outputs
    inputs = inputs_of(sources, len(b))
    n, positions, reads = inputs.sizes
    grid = cdiv(positions, DOT_ROWS.value), n
    inputs.launch(dca_scores, grid, WARPS, [inputs.table, w, score])
    # without a start, its pointer is not used
    begin = align(start[0]) if start else out
    inputs.launch(
        dca_forward, inputs.tiles, WARPS, [(inputs.table, b, score), begin, out], len(start), COUNT=_count(reads)
    )


@register("gated_reads_backward", schema=BACKWARD)
def launch_backward(grads, outputs, parameters, sources, start, eps, source_grads, added, sums):
    b, w, grad = (align(x) for x in (*parameters, *grads))
    (score,), (partial,) = outputs, sums
    inputs, grad_score = inputs_of(sources, len(b), source_grads, added), torch.empty_like(score)
    n, positions, reads = inputs.sizes
    (programs, rows), columns = _programs(positions, n, reads), inputs.tiles[1]
    read_ptrs = grad, inputs.table, b, score, grad_score
    even = positions % (STEPS.value * LANES.value) == 0 and inputs.settings.D.value % COLUMNS.value == 0
    grid = _groups(n, reads), programs
    inputs.launch(dca_score_bias_grads, grid, SOURCES.value, [read_ptrs, partial[0]], rows, EVEN=even)
    inputs.launch(dca_source_grads, inputs.tiles, WARPS, [read_ptrs, w], COUNT=_count(reads))
    grid, tensors = (n, columns, programs), [inputs.table, grad_score, partial[1]]
    inputs.launch(dca_gate_grads, grid, WARPS, tensors, rows)


def backward(inputs: BackwardInputs) -> list[Tensor]:
    (reads, n, d), positions = inputs.parameters[0].shape, inputs.sources[0].shape[:-1].numel()
    padded = cdiv(reads, FEW_READS.value) * FEW_READS.value, cdiv(n, SOURCES.value) * SOURCES.value
    partial = inputs.grads[0].new_empty(2, _programs(positions, n, reads)[0], *padded, d, dtype=torch.float32)
    launch_backward(*inputs, [partial])
    of_parameters = zip(partial[:, :, :reads, :n].sum(1), inputs.parameters, strict=True)
    return [*(x.to(y.dtype) for x, y in of_parameters), *(inputs.grads[0].to(x.dtype) for x in inputs.start)]


KERNELS = Kernels("dca", 1, allocate, forward, backward)


def _groups(n: int, reads: int) -> int:
    """Return the groups of sources and reads of `dca_score_bias_grads`."""
    return cdiv(n, SOURCES.value) * cdiv(reads, FEW_READS.value)


def _programs(positions: int, n: int, reads: int) -> tuple[int, int]:
    """Return the programs over positions of the gradients of parameters, and the positions of each."""
    most = max(PROGRAMS, ALL_PROGRAMS // _groups(n, reads))
    return split_work(positions, most, STEPS.value * LANES.value)


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
    """Return b + w . x, of which the gate is the ReLU."""
    return _of_dimensions(b_ptr, s, j, n, c, reads, D) + _of_positions(score_ptr, s, j, p, positions, reads)


@triton.jit(do_not_specialize=COUNTS)
def dca_scores(table_ptr, w_ptr, score_ptr, n, positions, reads, SETTINGS):
    j = tl.program_id(1)
    p, s = tl.program_id(0) * DOT_ROWS + tl.arange(0, DOT_ROWS), tl.arange(0, DOT_READS)
    score = tl.zeros([DOT_ROWS, DOT_READS], tl.float32)
    for first in range(0, SETTINGS.D, WIDTH):
        c = first + tl.arange(0, WIDTH)
        at, mask = tile_at(p, c, positions, SETTINGS.D)
        x = load_source(table_ptr, j, at, mask, SETTINGS)
        w_at, mask_w = (s * n + j)[:, None] * SETTINGS.D + c[None, :], (s < reads)[:, None] & (c < SETTINGS.D)[None, :]
        w = load_fp32(w_ptr, w_at, mask_w)
        # an error of a score opens or closes gates, and a gate is all or nothing in the gradient of b
        score = tl.dot(x, tl.trans(w), score, input_precision="tf32x3")
    at = (j * reads + s)[None, :] * positions + p[:, None]
    tl.store(score_ptr + at, score, (s < reads)[None, :] & (p < positions)[:, None])


@triton.jit(do_not_specialize=COUNTS)
def dca_forward(read_ptrs, start_ptr, out_ptr, n, positions, reads, started, SETTINGS, COUNT: tl.constexpr):
    table_ptr, b_ptr, score_ptr = read_ptrs
    p, c, at, mask = tile_of_program(positions, SETTINGS.D, ROWS)
    out = load_reads(start_ptr, at, mask & (started != 0), positions, reads, SETTINGS.D, COUNT)
    for j in range(n):
        x = load_source(table_ptr, j, at, mask, SETTINGS)
        sums = ()
        for s in tl.static_range(COUNT):
            gate = _gate(b_ptr, score_ptr, s, j, n, p, c, positions, reads, SETTINGS.D)
            sums += (out[s] + tl.maximum(gate, 0.0) * x,)
        out = sums
    store_reads(out_ptr, at, out, mask, positions, reads, SETTINGS.D, COUNT)


@triton.jit(do_not_specialize=COUNTS)
def dca_score_bias_grads(read_ptrs, partial_ptr, n, positions, reads, rows, SETTINGS, EVEN: tl.constexpr):
    # tiles are [STEPS, SOURCES, LANES, 8, 4]: a thread has all steps and 4 columns, and a warp has one source
    grad_ptr, table_ptr, b_ptr, score_ptr, grad_score_ptr = read_ptrs
    # groups of reads are next to each other, so that a source is loaded from memory for only one of them
    groups = tl.cdiv(reads, FEW_READS)
    first_s = tl.program_id(0) % groups * FEW_READS
    source = tl.program_id(0) // groups * SOURCES + tl.arange(0, SOURCES)
    # programs that lack a source or a read compute the last one again, and their sums are not used
    j = tl.minimum(source, n - 1)
    x_ptrs, flags = rows_of(table_ptr, 0, j, n, SETTINGS.NARROW)
    source, j, wide = source[None, :, None, None, None], j[None, :, None, None, None], flags[None, :, :, None, None] & 1
    step, lane = tl.arange(0, STEPS)[:, None, None, None, None] * LANES, tl.arange(0, LANES)[None, None, :, None, None]
    c = tl.arange(0, COLUMNS // 4)[None, None, None, :, None] * 4 + tl.arange(0, 4)[None, None, None, None, :]
    # a step adds a constant to an address of a thread
    step_at, at = step * SETTINGS.D, lane * SETTINGS.D + c + j * 0
    b_at, to_at = lane * 0 + c + j * SETTINGS.D, lane * 0 + c + source * SETTINGS.D
    narrow_ptr, wide_ptr = x_ptrs[0][None, :, :, None, None] + at, x_ptrs[1][None, :, :, None, None] + at
    first = tl.program_id(1) * rows
    padded = tl.cdiv(n, SOURCES) * SOURCES
    partial_ptr += tl.program_id(1) * tl.cast(groups * FEW_READS * padded, tl.int64) * SETTINGS.D
    for row in range(first, min(first + rows, positions), STEPS * LANES):
        p = row + step + lane
        mask_p, scores, sums = (p < positions) | EVEN, (), ()
        for s in tl.static_range(FEW_READS):
            score_at = (j * reads + min(first_s + s, reads - 1)) * positions + p
            scores += (tl.load(score_ptr + score_at, mask_p, other=0.0),)
            sums += (tl.zeros([STEPS, SOURCES, LANES, COLUMNS // 4, 1], tl.float32),)
        for start in range(0, SETTINGS.D, COLUMNS):
            mask_c, begin = (start + c < SETTINGS.D) | EVEN, tl.cast(row, tl.int64) * SETTINGS.D + start
            x = load_typed((narrow_ptr + begin, wide_ptr + begin), wide, step_at, mask_p & mask_c, SETTINGS.KIND)
            totals, next_grad = (), _grad(grad_ptr, first_s, begin, at, step_at, mask_p & mask_c, positions, SETTINGS.D)
            for s in tl.static_range(FEW_READS):
                read, grad = min(first_s + s, reads - 1), next_grad
                b = load_fp32(b_ptr + (read * n * SETTINGS.D + start), b_at, mask_c)
                to_ptr = partial_ptr + ((first_s + s) * padded * SETTINGS.D + start) + to_at
                before = tl.load(to_ptr, mask_c & (row > first), other=0.0)
                if s + 1 < FEW_READS:
                    later = min(first_s + s + 1, reads - 1)
                    next_grad = _grad(grad_ptr, later, begin, at, step_at, mask_p & mask_c, positions, SETTINGS.D)
                # the gate is open where b + score > 0; a product that is added could be fused in one lane only
                terms = tl.where(b > -scores[s], grad * x, 0.0)
                totals += (sums[s] + tl.sum(terms, axis=4, keep_dims=True),)
                grad_b = before + tl.sum(tl.sum(terms, axis=0, keep_dims=True), axis=2, keep_dims=True)
                tl.store(to_ptr, grad_b, mask_c & (lane == 0))
            sums = totals
        for s in tl.static_range(FEW_READS):
            to_ptr = grad_score_ptr + (j * reads + first_s + s) * positions + p
            kept = (p < positions) & (source < n) & (first_s + s < reads)
            tl.store(to_ptr, tl.sum(sums[s], axis=3, keep_dims=True), kept)
        # the sums that one thread stored are loaded by others
        tl.debug_barrier()


@triton.jit
def _grad(grad_ptr, read, begin, at, step_at, mask, positions, D: tl.constexpr):
    """Load a tile of the gradient of a read, the same for all sources."""
    return load_fp32(grad_ptr + (tl.cast(positions, tl.int64) * (read * D) + begin) + at, step_at, mask)


@triton.jit(do_not_specialize=COUNTS)
def dca_source_grads(read_ptrs, w_ptr, n, positions, reads, SETTINGS, COUNT: tl.constexpr):
    grad_ptr, table_ptr, b_ptr, score_ptr, grad_score_ptr = read_ptrs
    p, c, at, mask = tile_of_program(positions, SETTINGS.D, ROWS)
    grad = load_reads(grad_ptr, at, mask, positions, reads, SETTINGS.D, COUNT)
    for j in range(n):
        grad_x = tl.zeros([ROWS, WIDTH], tl.float32)
        for s in tl.static_range(COUNT):
            grad_x += tl.maximum(_gate(b_ptr, score_ptr, s, j, n, p, c, positions, reads, SETTINGS.D), 0.0) * grad[s]
            grad_score = _of_positions(grad_score_ptr, s, j, p, positions, reads)
            grad_x += grad_score * _of_dimensions(w_ptr, s, j, n, c, reads, SETTINGS.D)
        store_grad(table_ptr, j, at, grad_x, mask, SETTINGS)


@triton.jit(do_not_specialize=COUNTS)
def dca_gate_grads(table_ptr, grad_score_ptr, partial_ptr, n, positions, reads, rows, SETTINGS):
    j, c = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    s, grad_w = tl.arange(0, DOT_READS), tl.zeros([DOT_READS, WIDTH], tl.float32)
    first = tl.program_id(2) * rows
    end = min(first + rows, positions)
    for row in range(first, end, ROWS):
        p = row + tl.arange(0, ROWS)
        at, mask = tile_at(p, c, end, SETTINGS.D)
        x = load_source(table_ptr, j, at, mask, SETTINGS)
        score_at = (j * reads + s)[:, None] * positions + p[None, :]
        grad_score = tl.load(grad_score_ptr + score_at, (s < reads)[:, None] & (p < end)[None, :], other=0.0)
        grad_w = tl.dot(grad_score, x, grad_w, input_precision="tf32x3")
    padded = tl.cdiv(n, SOURCES) * SOURCES
    partial_ptr += tl.program_id(2) * tl.cast(tl.cdiv(reads, FEW_READS) * FEW_READS * padded, tl.int64) * SETTINGS.D
    to_ptr = partial_ptr + ((s * padded + j) * SETTINGS.D)[:, None] + c[None, :]
    tl.store(to_ptr, grad_w, (s < reads)[:, None] & (c < SETTINGS.D)[None, :])
