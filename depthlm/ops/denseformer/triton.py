# mypy: allow-untyped-defs, disable-error-code="assignment"
"""`weighted_reads` in Triton. The backward pass is two matrix products per tile of sources and 16 reads.

Shapes: s reads, n sources, p positions, d width, v values (p and d together).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthlm.ops.backend import expect
from depthlm.ops.library import register
from depthlm.ops.reads import BACKWARD, FORWARD, BackwardInputs, Kernels, read
from depthlm.ops.reads_triton import (
    COUNTS,
    DOT_READS,
    MIXED,
    ROWS,
    WARPS,
    aligned,
    inputs_of,
    load_parts,
    load_reads,
    load_source,
    parts_of,
    product,
    rows_of,
    store_reads,
    store_typed,
    tile_of_program,
    transposed,
)
from depthlm.ops.triton_common import cdiv, load_fp32, split_work, tl, triton

# sources and values of a tile of the backward pass
SOURCES, TILE_VALUES, BACKWARD_WARPS = tl.constexpr(32), tl.constexpr(64), 2
# programs of the backward pass for each SOURCES
PROGRAMS = 512


def weighted(weights_sn: Tensor, sources: Sequence[Tensor], start_spd: Tensor | None = None) -> Tensor:
    """Run `weighted_reads`. Raises: ValueError for a wrong shape or device, TypeError for a wrong dtype."""
    expect("denseformer", weights_sn, weights=(weights_sn, (len(weights_sn), len(sources))))
    return read(KERNELS, [weights_sn], sources, [] if start_spd is None else [start_spd])[0]


@register(__name__, "weighted_reads", schema=FORWARD)
def forward(parameters, sources, start, eps, outputs):
    (weights,), (out,) = parameters, outputs
    inputs = inputs_of(sources, len(weights))
    begin = aligned(start[0]) if start else out
    tensors = inputs.table, weights.contiguous(), begin, out
    inputs.launch(denseformer_forward, inputs.tiles, WARPS, tensors, len(start), COUNT=len(weights))


@register(__name__, "weighted_reads_backward", schema=BACKWARD)
def launch_backward(grads, outputs, parameters, sources, start, eps, source_grads, added, sums):
    (weights,), (partial,) = parameters, sums
    inputs = inputs_of(sources, len(weights), source_grads, added)
    programs, steps = _programs(sources[0].numel())
    grid = cdiv(len(sources), SOURCES.value), programs
    tensors = aligned(grads[0]), inputs.table, weights.contiguous(), partial
    inputs.launch(denseformer_backward, grid, BACKWARD_WARPS, tensors, steps)


def backward(inputs: BackwardInputs) -> list[Tensor]:
    (weights,), n = inputs.parameters, len(inputs.sources)
    programs, _ = _programs(inputs.sources[0].numel())
    columns = cdiv(n, SOURCES.value) * SOURCES.value
    partial = weights.new_empty(programs, columns, DOT_READS.value, dtype=torch.float32)
    launch_backward(*inputs, [partial])
    grad_weights = partial.sum(0)[:n, : len(weights)].T.contiguous().to(weights.dtype)
    return [grad_weights, *(inputs.grads[0].to(x.dtype) for x in inputs.start)]


KERNELS = Kernels("denseformer", 1, lambda parameters, sources: [], forward, backward)


def _programs(values: int) -> tuple[int, int]:
    """Return the programs of the backward pass for each SOURCES, and the tiles of each."""
    return split_work(cdiv(values, TILE_VALUES.value), PROGRAMS)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["weights_ptr"])
def denseformer_forward(
    table_ptr,
    weights_ptr,
    start_ptr,
    out_ptr,
    n,
    positions,
    reads,
    started,
    D: tl.constexpr,
    NARROW: tl.constexpr,
    KIND: tl.constexpr,
    COUNT: tl.constexpr,
):
    _, _, at, mask = tile_of_program(positions, D, ROWS)
    out = load_reads(start_ptr, at, mask & (started != 0), positions, reads, D, COUNT)
    for j in range(n):
        x = load_source(table_ptr, j, at, mask, NARROW, KIND)
        sums = ()
        for s in tl.static_range(COUNT):
            weight = tl.load(weights_ptr + s * n + j).to(tl.float32)
            sums += (out[s] + weight * x,)
        out = sums
    store_reads(out_ptr, at, out, mask, positions, reads, D, COUNT)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["weights_ptr"])
def denseformer_backward(
    grad_ptr,
    table_ptr,
    weights_ptr,
    partial_ptr,
    n,
    positions,
    reads,
    steps,
    D: tl.constexpr,
    NARROW: tl.constexpr,
    KIND: tl.constexpr,
):
    j, s = tl.program_id(0) * SOURCES + tl.arange(0, SOURCES), tl.arange(0, DOT_READS)
    x_ptrs, flags = rows_of(table_ptr, 0, j, n, NARROW)
    grad_x_ptrs, _ = rows_of(table_ptr, 1, j, n, NARROW)
    weights = load_fp32(weights_ptr, s[None, :] * n + j[:, None], (j < n)[:, None] & (s < reads)[None, :])
    weights = parts_of(weights, MIXED | KIND)
    values, grad_weights = tl.cast(positions, tl.int64) * D, tl.zeros([DOT_READS, SOURCES], tl.float32)
    for step in range(steps):
        v = (tl.cast(tl.program_id(1), tl.int64) * steps + step) * TILE_VALUES + tl.arange(0, TILE_VALUES)
        grad_at = tl.cast(positions, tl.int64) * (s * D)[:, None] + v[None, :]
        grad = load_fp32(grad_ptr, grad_at, (s < reads)[:, None] & (v < values)[None, :])
        mask = (j < n)[:, None] & (v < values)[None, :]
        x, grad = load_parts(x_ptrs, flags, v[None, :], mask, KIND), parts_of(grad, MIXED | KIND)
        grad_weights = product(grad, transposed(x), grad_weights, MIXED | KIND, KIND)
        grad_x = tl.zeros([SOURCES, TILE_VALUES], tl.float32)
        grad_x = product(weights, grad, grad_x, MIXED | KIND, MIXED | KIND)
        store_typed(grad_x_ptrs, flags & 1, flags & 2, v[None, :], grad_x, mask, KIND)
    to_ptr = partial_ptr + (tl.program_id(1) * tl.num_programs(0) * SOURCES + j)[None, :] * DOT_READS + s[:, None]
    tl.store(to_ptr, grad_weights)
