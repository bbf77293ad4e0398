# mypy: allow-untyped-defs, disable-error-code="assignment"
"""`weighted_reads` in Triton. A program has a tile of each read in registers, and loads each source once.

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
    ROWS,
    WARPS,
    align,
    inputs_of,
    load_reads,
    load_source,
    store_grad,
    store_reads,
    tile_of_program,
)
from depthlm.ops.tiles import tiles_of
from depthlm.ops.triton_common import cdiv, load_fp32, tl, triton

# values of a program of the backward pass, which has one warp, so that no sum crosses warps
TILE_VALUES = tl.constexpr(tiles_of("denseformer")["TILE_VALUES"])


def weighted(weights_sn: Tensor, sources: Sequence[Tensor], start_spd: Tensor | None = None) -> Tensor:
    """Run `weighted_reads`. Raises: ValueError for a wrong shape or device, TypeError for a wrong dtype."""
    expect("denseformer", weights_sn, weights=(weights_sn, (len(weights_sn), len(sources))))
    return read(KERNELS, [weights_sn], sources, [] if start_spd is None else [start_spd])[0]


@register("weighted_reads", schema=FORWARD)
def forward(parameters, sources, start, eps, outputs):
    (weights,), (out,) = parameters, outputs
    inputs = inputs_of(sources, len(weights))
    begin = align(start[0]) if start else out
    tensors = inputs.table, weights.contiguous(), begin, out
    inputs.launch(denseformer_forward, inputs.tiles, WARPS, tensors, len(start), COUNT=len(weights))


@register("weighted_reads_backward", schema=BACKWARD)
def launch_backward(grads, outputs, parameters, sources, start, eps, source_grads, added, sums):
    (weights,), (partial,) = parameters, sums
    inputs = inputs_of(sources, len(weights), source_grads, added)
    tensors = align(grads[0]), inputs.table, weights.contiguous(), partial
    even = sources[0].numel() % TILE_VALUES.value == 0
    grid = (_programs(sources[0]),)
    inputs.launch(denseformer_backward, grid, 1, tensors, COUNT=len(weights), EVEN=even)


def backward(inputs: BackwardInputs) -> list[Tensor]:
    (weights,), n = inputs.parameters, len(inputs.sources)
    partial = weights.new_empty(_programs(inputs.sources[0]), n, len(weights), dtype=torch.float32)
    launch_backward(*inputs, [partial])
    grad_weights = partial.sum(0).T.contiguous().to(weights.dtype)
    return [grad_weights, *(inputs.grads[0].to(x.dtype) for x in inputs.start)]


KERNELS = Kernels("denseformer", 1, lambda parameters, sources: [], forward, backward)


def _programs(x: Tensor) -> int:
    """Return the programs of the backward pass, one per tile."""
    return cdiv(x.numel(), TILE_VALUES.value)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["weights_ptr"])
def denseformer_forward(
    table_ptr, weights_ptr, start_ptr, out_ptr, n, positions, reads, started, SETTINGS, COUNT: tl.constexpr
):
    _, _, at, mask = tile_of_program(positions, SETTINGS.D, ROWS)
    out = load_reads(start_ptr, at, mask & (started != 0), positions, reads, SETTINGS.D, COUNT)
    x = load_source(table_ptr, 0, at, mask, SETTINGS)
    for j in range(n):
        # the next source is loaded while this one is used
        following = load_source(table_ptr, min(j + 1, n - 1), at, mask, SETTINGS)
        sums = ()
        for s in tl.static_range(COUNT):
            weight = tl.load(weights_ptr + s * n + j).to(tl.float32)
            sums += (out[s] + weight * x,)
        out, x = sums, following
    store_reads(out_ptr, at, out, mask, positions, reads, SETTINGS.D, COUNT)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["weights_ptr"])
def denseformer_backward(
    grad_ptr,
    table_ptr,
    weights_ptr,
    partial_ptr,
    n,
    positions,
    reads,
    SETTINGS,
    COUNT: tl.constexpr,
    EVEN: tl.constexpr,
):
    values, program = tl.cast(positions, tl.int64) * SETTINGS.D, tl.cast(tl.program_id(0), tl.int64)
    v = program * TILE_VALUES + tl.arange(0, TILE_VALUES)
    mask = (v < values) | EVEN
    grads = ()
    for s in tl.static_range(COUNT):
        grads += (load_fp32(grad_ptr + values * s, v, mask),)
    partial_ptr += program * (n * COUNT)
    x = load_source(table_ptr, 0, v, mask, SETTINGS)
    for j in range(n):
        # the next source is loaded while this one is used
        following = load_source(table_ptr, min(j + 1, n - 1), v, mask, SETTINGS)
        grad_x = tl.zeros_like(x)
        for s in tl.static_range(COUNT):
            grad_x += tl.load(weights_ptr + s * n + j).to(tl.float32) * grads[s]
            tl.store(partial_ptr + (j * COUNT + s), tl.sum(grads[s] * x, axis=0))
        store_grad(table_ptr, j, v, grad_x, mask, SETTINGS)
        x = following
