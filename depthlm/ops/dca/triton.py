# mypy: allow-untyped-defs, disable-error-code="assignment"
"""`gated_reads` in Triton.

A first kernel computes all scores w . x. Then each program of the forward pass computes a tile of the output for all
reads. The backward pass computes the gradients of the scores, for which it needs all dimensions, and then the
gradients of everything else.

Shapes: s reads, n sources, p positions, d width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthlm.ops.autograd import operator_name
from depthlm.ops.backend import expect
from depthlm.ops.reads import BACKWARD, FORWARD, BackwardInputs, Kernels, read
from depthlm.ops.reads_triton import (
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
    load_source,
    row_programs,
    scores,
    store_grad,
    store_reads,
    tile_at,
)
from depthlm.ops.triton_common import load_fp32, tl, triton

# sources and reads of a program of `_parameter_grads`, which has a sum of b for each pair of them in registers
SOURCES, FEW_READS = tl.constexpr(3), tl.constexpr(3)


def gated(b_snd: Tensor, w_snd: Tensor, sources: Sequence[Tensor], start_spd: Tensor | None = None) -> Tensor:
    """Run `gated_reads`. Raises: ValueError for a wrong shape or device, TypeError for a wrong dtype."""
    shape = (len(b_snd), len(sources), sources[0].shape[-1])
    expect("dca", b_snd, bias=(b_snd, shape), gate=(w_snd, shape))
    return read(KERNELS, [b_snd, w_snd], sources, [] if start_spd is None else [start_spd])[0]


def allocate(parameters: list[Tensor], sources: list[Tensor]) -> list[Tensor]:
    """Return an empty score_nsp."""
    b, x = parameters[0], sources[0]
    return [b.new_empty(len(sources), len(b), x.shape[:-1].numel(), dtype=torch.float32)]


@torch.library.custom_op(operator_name(__name__, "gated_reads"), **FORWARD)
def forward(parameters, sources, start, eps, outputs):
    b, w = (aligned(x) for x in parameters)
    out, score = outputs
    inputs = inputs_of(sources, len(b))
    scores(w, inputs, score)
    # without a start, its pointer is not used
    begin = aligned(start[0]) if start else out
    inputs.launch(_forward, inputs.tiles, WARPS, [(inputs.table, b, score), begin, out], len(start))


@torch.library.custom_op(operator_name(__name__, "gated_reads_backward"), **BACKWARD)
def launch_backward(grads, outputs, parameters, sources, start, eps, source_grads, added, sums):
    b, w, grad = (aligned(x) for x in (*parameters, *grads))
    (score,), (partial,) = outputs, sums
    inputs, grad_score = inputs_of(sources, len(b), source_grads, added), torch.empty_like(score)
    n, positions, reads = inputs.sizes
    row_tiles, columns = inputs.tiles
    programs, rows = row_programs(positions)
    groups = triton.cdiv(n, SOURCES.value) * triton.cdiv(reads, FEW_READS.value)
    read_ptrs = grad, inputs.table, b, score, grad_score
    inputs.launch(_score_grads, (row_tiles,), WARPS, [read_ptrs])
    inputs.launch(_source_grads, inputs.tiles, FEW_WARPS, [read_ptrs, w])
    inputs.launch(_parameter_grads, (groups, columns, programs), FEW_WARPS, [read_ptrs, partial], rows)


def backward(inputs: BackwardInputs) -> list[Tensor]:
    (reads, n, d), positions = inputs.parameters[0].shape, inputs.sources[0].shape[:-1].numel()
    partial = inputs.grads[0].new_empty(2, row_programs(positions)[0], reads, n, d, dtype=torch.float32)
    launch_backward(*inputs, [partial])
    of_parameters = zip(partial.sum(1), inputs.parameters, strict=True)
    return [*(x.to(y.dtype) for x, y in of_parameters), *(inputs.grads[0].to(x.dtype) for x in inputs.start)]


KERNELS = Kernels("dca", 1, allocate, forward, backward)


@triton.jit
def _load_b(b_ptr, s, j, n, c, D: tl.constexpr):
    return tl.load(b_ptr + (s * n + j) * D + c, c < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _load_score(score_ptr, s, j, p, positions, reads):
    return tl.load(score_ptr + (j * reads + s) * positions + p, (p < positions) & (s < reads), other=0.0)


@triton.jit
def _zeros(COUNT: tl.constexpr, HEIGHT: tl.constexpr):
    """Return COUNT tiles of zeros."""
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros += (tl.zeros([HEIGHT, WIDTH], tl.float32),)
    return zeros


@triton.jit(do_not_specialize=COUNTS)
def _forward(read_ptrs, start_ptr, out_ptr, n, positions, reads, started, D: tl.constexpr, NARROW: tl.constexpr):
    table_ptr, b_ptr, score_ptr = read_ptrs
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at, mask = tile_at(p, c, positions, D)
    out = load_reads(start_ptr, at, mask & (started != 0), positions, reads, D)
    for j in range(n):
        x = load_source(table_ptr, j, at, mask, NARROW)
        sums = ()
        for s in tl.static_range(READS):
            total = out[s]
            if s < reads:
                score = _load_score(score_ptr, s, j, p, positions, reads)[:, None]
                total += tl.maximum(_load_b(b_ptr, s, j, n, c, D) + score, 0.0) * x
            sums += (total,)
        out = sums
    store_reads(out_ptr, at, out, mask, positions, reads, D)


@triton.jit(do_not_specialize=COUNTS)
def _score_grads(read_ptrs, n, positions, reads, D: tl.constexpr, NARROW: tl.constexpr):
    grad_ptr, table_ptr, b_ptr, score_ptr, grad_score_ptr = read_ptrs
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for first in range(0, D, WIDTH):
        c = first + tl.arange(0, WIDTH)
        at, mask = tile_at(p, c, positions, D)
        grad = load_reads(grad_ptr, at, mask, positions, reads, D)
        for j in range(n):
            x = load_source(table_ptr, j, at, mask, NARROW)
            for s in tl.static_range(READS):
                if s < reads:
                    score = _load_score(score_ptr, s, j, p, positions, reads)[:, None]
                    is_open = _load_b(b_ptr, s, j, n, c, D) + score > 0.0
                    grad_score = tl.sum(tl.where(is_open, grad[s] * x, 0.0), axis=1)
                    to_ptr = grad_score_ptr + (j * reads + s) * positions + p
                    grad_score += tl.load(to_ptr, (p < positions) & (first > 0), other=0.0)
                    tl.store(to_ptr, grad_score, p < positions)
        # the sums that one thread stored are read by others
        tl.debug_barrier()


@triton.jit(do_not_specialize=COUNTS)
def _source_grads(read_ptrs, w_ptr, n, positions, reads, D: tl.constexpr, NARROW: tl.constexpr):
    grad_ptr, table_ptr, b_ptr, score_ptr, grad_score_ptr = read_ptrs
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c, dot_s = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, DOT_READS)
    at, mask = tile_at(p, c, positions, D)
    grad = load_reads(grad_ptr, at, mask, positions, reads, D)
    for j in range(n):
        grad_score = _load_score(grad_score_ptr, dot_s[None, :], j, p[:, None], positions, reads)
        w_at = ((dot_s * n + j) * D)[:, None] + c[None, :]
        w = load_fp32(w_ptr, w_at, (dot_s < reads)[:, None] & (c < D)[None, :])
        grad_x = tl.dot(grad_score, w, input_precision="tf32x3")
        for s in tl.static_range(READS):
            if s < reads:
                score = _load_score(score_ptr, s, j, p, positions, reads)[:, None]
                grad_x += tl.maximum(_load_b(b_ptr, s, j, n, c, D) + score, 0.0) * grad[s]
        store_grad(table_ptr, j, at, grad_x, mask, NARROW)


@triton.jit(do_not_specialize=COUNTS)
def _parameter_grads(read_ptrs, partial_ptr, n, positions, reads, rows, D: tl.constexpr, NARROW: tl.constexpr):
    grad_ptr, table_ptr, b_ptr, score_ptr, grad_score_ptr = read_ptrs
    # groups of reads are next to each other, so that a source is loaded from memory for only one of them
    groups = tl.cdiv(reads, FEW_READS)
    first_s, first_j = tl.program_id(0) % groups * FEW_READS, tl.program_id(0) // groups * SOURCES
    c, dot_s = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, DOT_READS)
    grad_w, grad_b = _zeros(SOURCES, DOT_READS), _zeros(FEW_READS * SOURCES, HALF_ROWS)
    first = tl.program_id(2) * rows
    for row in range(first, min(first + rows, positions), HALF_ROWS):
        p = row + tl.arange(0, HALF_ROWS)
        at, mask = tile_at(p, c, positions, D)
        xs, sums_w, sums_b = (), (), ()
        for k in tl.static_range(SOURCES):
            # what is computed again for the last source is not stored
            j = min(first_j + k, n - 1)
            x, total = load_source(table_ptr, j, at, mask, NARROW), grad_w[k]
            # one product has room for all reads, so only the first group of reads computes it
            if first_s == 0:
                grad_score = _load_score(grad_score_ptr, dot_s[:, None], j, p[None, :], positions, reads)
                total = tl.dot(grad_score, x, total, input_precision="tf32x3")
            xs += (x,)
            sums_w += (total,)
        for s in tl.static_range(FEW_READS):
            read = first_s + s
            grad = load_fp32(grad_ptr, tl.cast(positions, tl.int64) * (read * D) + at, mask & (read < reads))
            for k in tl.static_range(SOURCES):
                total = grad_b[s * SOURCES + k]
                if read < reads:
                    j = min(first_j + k, n - 1)
                    score = _load_score(score_ptr, read, j, p, positions, reads)[:, None]
                    is_open = _load_b(b_ptr, read, j, n, c, D) + score > 0.0
                    total += tl.where(is_open, grad * xs[k], 0.0)
                sums_b += (total,)
        grad_w, grad_b = sums_w, sums_b
    # the partial sums of the biases come first, then those of w
    size = tl.cast(reads * n, tl.int64) * D
    partial_ptr += tl.program_id(2) * size
    for k in tl.static_range(SOURCES):
        j = first_j + k
        if j < n:
            for s in tl.static_range(FEW_READS):
                if first_s + s < reads:
                    total = tl.sum(grad_b[s * SOURCES + k], axis=0)
                    tl.store(partial_ptr + ((first_s + s) * n + j) * D + c, total, c < D)
            if first_s == 0:
                to_ptr = partial_ptr + tl.num_programs(2) * size + ((dot_s * n + j) * D)[:, None] + c[None, :]
                tl.store(to_ptr, grad_w[k], (dot_s < reads)[:, None] & (c < D)[None, :])
