# mypy: allow-untyped-defs, disable-error-code="assignment"
"""`weighted_reads` in Triton. The backward pass is two matrix products per tile of up to 16 sources and 16 reads.

Shapes: s reads, n sources, p positions, d width, v values (p and d together), r programs. A tile: R positions, C
dimensions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthlm.ops.backend import expect
from depthlm.ops.call import operator_name
from depthlm.ops.reads_triton import (
    COUNTS,
    DOT_READS,
    MAX_READS,
    TILE_ROWS,
    TILE_WIDTH,
    WARPS,
    aligned,
    check_reads,
    in_groups,
    joined,
    load_reads,
    load_source,
    narrow_dtype,
    of_group,
    one_narrow_dtype,
    store_reads,
    table_of,
    widest,
)
from depthlm.ops.source_sums import reserve_sums, returned, tokens_of
from depthlm.ops.triton_common import tl, triton

# values and sources of a tile of the backward pass
TILE_VALUES, SOURCES, BACKWARD_WARPS = 64, 16, 2
# programs of the backward pass for each 16 sources
PROGRAMS = 512


def weighted(weights_sn: Tensor, sources: Sequence[Tensor], start_spd: Tensor | None = None) -> Tensor:
    """Run `weighted_reads`. Raises: ValueError for a wrong shape or device, TypeError for a wrong dtype."""
    expect("denseformer", weights_sn, weights=(weights_sn, (len(weights_sn), len(sources))))
    check_reads("denseformer", weights_sn, sources, start_spd)
    dtype, xs = widest(sources, start_spd), one_narrow_dtype(sources)
    outputs, tokens = [], tokens_of(xs)
    for group in in_groups(len(weights_sn)):
        start = None if start_spd is None else of_group(start_spd, group)
        outputs.append(forward(of_group(weights_sn, group), xs, start, dtype, tokens))
    return joined(outputs)


@torch.library.custom_op(operator_name(__name__, "weighted_reads"), mutates_args=())
def forward(
    weights_sn: Tensor, sources: list[Tensor], start_spd: Tensor | None, dtype: torch.dtype, tokens: list[Tensor]
) -> Tensor:
    """Return out_spd in `dtype`. tokens: see `depthlm.ops.source_sums`; may be empty."""
    (reads, n), shape = weights_sn.shape, sources[0].shape
    d, positions = shape[-1], shape[:-1].numel()
    xs, out = [aligned(x) for x in sources], weights_sn.new_empty(reads, *shape, dtype=dtype)
    start = out if start_spd is None else aligned(start_spd)
    with torch.cuda.device_of(out):
        _forward[(triton.cdiv(positions, TILE_ROWS), triton.cdiv(d, TILE_WIDTH))](
            table_of(xs), weights_sn.contiguous(), start, out, n, positions, reads, int(start_spd is not None),
            D=d, R=TILE_ROWS, C=TILE_WIDTH, S=MAX_READS, NARROW=narrow_dtype(xs), num_warps=WARPS,
        )  # fmt: skip
    return out


@torch.library.custom_op(operator_name(__name__, "weighted_reads_backward"), mutates_args=("grads",))
def backward(
    grad_spd: Tensor, weights_sn: Tensor, sources: list[Tensor], grads: list[Tensor], added: list[bool]
) -> Tensor:
    """Return the gradients of the weights. Write those of the sources to `grads`, or add them to it."""
    (reads, n), shape = weights_sn.shape, sources[0].shape
    d, positions = shape[-1], shape[:-1].numel()
    xs, grad = [aligned(x) for x in sources], aligned(grad_spd)
    tiles = triton.cdiv(positions * d, TILE_VALUES)
    steps, blocks = triton.cdiv(tiles, PROGRAMS), triton.cdiv(n, SOURCES)
    programs = triton.cdiv(tiles, steps)
    partial = grad.new_empty(programs, blocks * SOURCES, DOT_READS, dtype=torch.float32)
    with torch.cuda.device_of(grad):
        _backward[(blocks, programs)](
            grad, table_of(xs, grads, added), weights_sn.contiguous(), partial, n, positions, reads, steps, D=d,
            V=TILE_VALUES, S=DOT_READS, N=SOURCES, NARROW=narrow_dtype(xs), num_warps=BACKWARD_WARPS,
        )  # fmt: skip
    return partial.sum(0)[:n, :reads].T.contiguous().to(weights_sn.dtype)


@forward.register_fake
def _(weights_sn, sources, start_spd, dtype, tokens):
    return weights_sn.new_empty((len(weights_sn), *sources[0].shape), dtype=dtype)


@backward.register_fake
def _(grad_spd, weights_sn, sources, grads, added):
    return weights_sn.new_empty(weights_sn.shape)


def _setup_context(ctx, inputs, output):
    weights, sources, start, _, tokens = inputs
    ctx.num_tokens = len(tokens)
    ctx.start = None if start is None else start.dtype
    ctx.save_for_backward(weights, *sources)


def _differentiate(ctx, grad):
    weights, *sources = ctx.saved_tensors
    grads, added = reserve_sums(ctx, ctx.num_tokens, sources)
    grad_weights = backward(grad, weights, sources, grads, added)
    of_sources, of_tokens = returned(ctx.num_tokens, grads)
    return grad_weights, of_sources, None if ctx.start is None else grad.to(ctx.start), None, of_tokens


forward.register_autograd(_differentiate, setup_context=_setup_context)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["weights_ptr"])
def _forward(
    table_ptr, weights_ptr, start_ptr, out_ptr, n, positions, reads, started, D: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, S: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    p, c = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * C + tl.arange(0, C)
    inside = (p < positions)[:, None] & (c < D)[None, :]
    at = tl.cast(p, tl.int64)[:, None] * D + c[None, :]
    out = load_reads(start_ptr, at, inside & (started != 0), positions, reads, D, S)
    for j in range(n):
        x = load_source(table_ptr, j, at, inside, NARROW)
        sums = ()
        for s in tl.static_range(S):
            weight = tl.load(weights_ptr + s * n + j, s < reads, other=0.0).to(tl.float32)
            sums += (out[s] + weight * x,)
        out = sums
    store_reads(out_ptr, at, out, inside, positions, reads, D, S)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["weights_ptr"])
def _backward(
    grad_ptr, table_ptr, weights_ptr, partial_ptr, n, positions, reads, steps, D: tl.constexpr, V: tl.constexpr,
    S: tl.constexpr, N: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    j, s = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, S)
    x_address = tl.load(table_ptr + j * 3, j < n, other=0)
    grad_address = tl.load(table_ptr + j * 3 + 1, j < n, other=0)
    flags = tl.load(table_ptr + j * 3 + 2, j < n, other=0)[:, None]
    wide, added = (flags & 1) != 0, (flags & 2) != 0
    weights = tl.load(weights_ptr + s[None, :] * n + j[:, None], (j < n)[:, None] & (s < reads)[None, :], other=0.0)
    values, of_weights = tl.cast(positions, tl.int64) * D, tl.zeros([N, S], tl.float32)
    for step in range(steps):
        v = (tl.cast(tl.program_id(1), tl.int64) * steps + step) * V + tl.arange(0, V)
        of_reads = (s < reads)[:, None] & (v < values)[None, :]
        grad_at = tl.cast(positions, tl.int64) * (s * D)[:, None] + v[None, :]
        grad = tl.load(grad_ptr + grad_at, of_reads, other=0.0).to(tl.float32)
        inside = (j < n)[:, None] & (v < values)[None, :]
        narrow_ptr = tl.multiple_of(tl.cast(x_address, tl.pointer_type(NARROW)), 16)[:, None] + v[None, :]
        wide_ptr = tl.multiple_of(tl.cast(x_address, tl.pointer_type(tl.float32)), 16)[:, None] + v[None, :]
        x = tl.load(narrow_ptr, inside & (wide == 0), other=0.0).to(tl.float32)
        x += tl.load(wide_ptr, inside & wide, other=0.0)
        of_weights = tl.dot(x, tl.trans(grad), of_weights, input_precision="tf32x3")
        grad_x = tl.dot(weights.to(tl.float32), grad, input_precision="tf32x3")
        narrow_ptr = tl.multiple_of(tl.cast(grad_address, tl.pointer_type(NARROW)), 16)[:, None] + v[None, :]
        wide_ptr = tl.multiple_of(tl.cast(grad_address, tl.pointer_type(tl.float32)), 16)[:, None] + v[None, :]
        grad_x += tl.load(narrow_ptr, inside & added & (wide == 0), other=0.0).to(tl.float32)
        grad_x += tl.load(wide_ptr, inside & added & wide, other=0.0)
        tl.store(narrow_ptr, grad_x.to(NARROW), inside & (wide == 0))
        tl.store(wide_ptr, grad_x, inside & wide)
    to_ptr = partial_ptr + (tl.program_id(1) * tl.num_programs(0) * N + j)[:, None] * S + s[None, :]
    tl.store(to_ptr, of_weights)
