# mypy: allow-untyped-defs, disable-error-code="assignment"
"""What `mhc_post_pre` and `hyper_post_pre` share in Triton: a pending write, the next read, and their derivatives.

The sources of a kernel are x, and output, post and res of a pending write, without res if H_res is the identity. A
program processes some positions, in chunks of columns of d. The maps of a write are vectors over positions: n of
H_post, then n^2 of H_res, row by row. Sums over columns stay with the threads that added them until the end of a loop.

Kernels compute a tensor of pointers and reach stream j by adding the scalar j * d to it; a second tensor of 64-bit
offsets would take more registers.

Shapes: b batch, t tokens, p positions (batch and tokens), n streams, i new stream, j old stream, d hidden size.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthlm.ops.autograd import call, present
from depthlm.ops.backend import expect
from depthlm.ops.dtypes import common_dtype
from depthlm.ops.library import register
from depthlm.ops.mhc.cpu import PAPER, Pending, Result
from depthlm.ops.mhc.rebuilding import mark_write, save_streams, saved_streams, written
from depthlm.ops.tiles import tiles_of
from depthlm.ops.triton_common import (
    cdiv,
    constants,
    load_fp32,
    next_power_of_2,
    on_device,
    store_as,
    tl,
    triton,
)

# warps of a program
WARPS = tiles_of("streams")["WARPS"]
Tensors = list[Tensor]


class Settings(NamedTuple):
    """The constants of a kernel. The last four are those of `Form`.

    positions: of a program. lanes: the threads that share a position; each has consecutive columns of a chunk.
    padded_n: n, padded to a power of 2. m: the columns of the projection. padded_m: m, padded to a power of 2 that
    matrix products allow.
    whole: whether the columns of a chunk divide d.
    identity: whether H_res is the identity.
    """

    n: tl.constexpr
    padded_n: tl.constexpr
    positions: tl.constexpr
    lanes: tl.constexpr
    columns: tl.constexpr
    m: tl.constexpr
    padded_m: tl.constexpr
    whole: tl.constexpr
    eps: tl.constexpr
    identity: tl.constexpr
    post_scale: tl.constexpr
    pre_eps: tl.constexpr
    post_eps: tl.constexpr
    res_eps: tl.constexpr


def settings_of(
    x_btnd: Tensor, eps: float, positions: int, identity: bool = False, form: Sequence[float] = PAPER
) -> Settings:
    """Return the constants of the kernels. positions: of a program; fewer take fewer registers, and load weights again.

    A chunk of columns is a line of the cache; of more than four streams it is half of one, because of registers.
    """
    n, d = x_btnd.shape[2:]
    lanes, line = max(8, 32 * WARPS // positions), 128 // x_btnd.itemsize
    columns = min(line if n <= 4 else line // 2, max(2 * lanes, next_power_of_2(d)))
    m = n * (2 if identity else n + 2)
    sizes = n, max(4, next_power_of_2(n)), positions, lanes, columns, m, max(16, next_power_of_2(m))
    return constants(Settings, *sizes, d % columns == 0, eps, identity, *form)


def check_streams(operator: str, x_btnd: Tensor, pending: Pending | None, **parameters: Any) -> None:
    """Check the streams, the pending write, and parameters as in `expect`."""
    b, t, n, d = x_btnd.shape
    shapes = (b, t, n, d), (b, t, d), (b, t, n), (b, t, n, n)
    tensors = x_btnd, *sources_of(pending)
    named = zip(("x", "output", "post", "res"), zip(tensors, shapes, strict=False), strict=False)
    expect(operator, x_btnd, **dict(named), **parameters)


def sources_of(pending: Pending | None) -> Tensors:
    """Return the tensors of a pending write, without res if H_res is the identity."""
    return present(*pending) if pending is not None else []


def write_and_read(
    operators: tuple[Callable[..., Tensors], Callable[..., Tensors]],
    x_btnd: Tensor,
    pending: Pending | None,
    parameters: Sequence[Tensor],
    settings: tuple[Any, ...],
    rebuild: bool,
    identity: bool = False,
    late: bool = False,
) -> Result:
    """Perform the pending write, if any, and the next read; return input_btd, X'_btnd, post_btn and res_btij.

    operators: two custom operators on contiguous tensors. The first one, (sources, parameters, *settings), returns
    input_btd, X'_btnd (empty without a pending write), post_btn, res_btij (unless H_res is the identity) and what the
    second one needs. The second one, (grads, sources, new, parameters, kept, *settings), returns the gradients of the
    sources and the first parameters, and a tensor with those of the others.
    late: whether the H_pre of the read is a parameter. The H_pre of X' is then returned after res_btij.
    """
    sources = [x_btnd, *sources_of(pending)]
    arguments = operators, settings, rebuild and pending is not None, len(sources), (3 if identity else 4) + late
    read_btd, new_btnd, post_btn, *maps = call(WriteAndRead, *arguments, *sources, *parameters)
    return read_btd, x_btnd if pending is None else new_btnd, post_btn, None if identity else maps.pop(0), *maps


class WriteAndRead(torch.autograd.Function):
    """Returns input_btd, X'_btnd (empty without a pending write), post_btn and, with four results, res_btij."""

    @staticmethod
    def forward(ctx, operators, settings, rebuild, count, results, *tensors):
        ctx.operator = operators[1]
        ctx.settings = settings
        ctx.counts = count, len(tensors)
        sources, parameters = _contiguous(tensors[:count]), _contiguous(tensors[count:])
        outputs = operators[0](sources, parameters, *settings)
        mark_write(ctx, tensors[0], rebuild, write_again)
        new = [outputs[1]] if count > 1 and not ctx.rebuilds else []
        save_streams(ctx, *tensors, *outputs[results:], *new)
        return tuple(outputs[:results])

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        saved = _contiguous(saved_streams(ctx))
        if ctx.rebuilds:
            saved.append(written(ctx))
            ctx.streams = None
        count, end = ctx.counts
        new = saved.pop() if count > 1 else saved[0]
        sources, parameters, kept = saved[:count], saved[count:end], saved[end:]
        *separate, packed = ctx.operator(_contiguous(grads), sources, new, parameters, kept, *ctx.settings)
        rest = parameters[len(separate) - count :]
        # one conversion instead of one per parameter
        parts = packed.to(common_dtype(rest)).split([parameter.numel() for parameter in rest])
        return *[None] * 5, *separate, *(part.view_as(y) for part, y in zip(parts, rest, strict=True))


def write_again(node: Any) -> Tensor:
    """Return X' of a node of `depthlm.ops.mhc.rebuilding` whose first saved tensors are the sources of a write."""
    return write_streams(_contiguous(saved_streams(node)[: node.counts[0]]))


@register("write_streams", lambda sources: torch.empty_like(sources[0]))
def write_streams(sources: Tensors) -> Tensor:
    """Return X'_btnd = H_res X + H_post^T y, with the same bits as `mhc_post_pre` and `hyper_post_pre` in Triton."""
    x_btnd = sources[0]
    new_btnd = torch.empty_like(x_btnd)
    settings = settings_of(x_btnd, 0.0, 16, len(sources) == 3)
    launch(mhc_write, sources, new_btnd, settings, chunks=cdiv(x_btnd.shape[-1], settings.columns.value))
    return new_btnd


def align_words(w: Tensor) -> Tensor:
    """Return w, copied if it does not start at a multiple of 4 bytes, as `load_shared` requires.

    A weight in 16 bits may start anywhere in the flat tensor of an optimizer.
    """
    return w.clone() if w.storage_offset() * w.itemsize % 4 else w


def empty_outputs(sources: Tensors, *shapes: list[int], identity: bool = False) -> Tensors:
    """Return the outputs of the first operator of `write_and_read`. shapes: of what the second one needs."""
    x_btnd = sources[0]
    b, t, n, d = x_btnd.shape
    outputs = [x_btnd.new_empty(b, t, d), x_btnd.new_empty(x_btnd.shape if len(sources) > 1 else 0)]
    maps_and_kept = [b, t, n], *([] if identity else [[b, t, n, n]]), *shapes
    return outputs + [x_btnd.new_empty(shape, dtype=torch.float32) for shape in maps_and_kept]


def launch(kernel: Any, sources: Tensors, *arguments: Any, chunks: int = 1) -> None:
    """Launch kernel(sources, *arguments, b * t, d, settings), where lists become tuples.

    A program processes some positions, and one of `chunks` parts of d.
    """
    b, t, _, d = sources[0].shape
    *others, settings = (tuple(y) if isinstance(y, list) else y for y in arguments)
    programs = cdiv(b * t, cast(Settings, settings).positions.value)
    with on_device(sources[0]):
        kernel[programs, chunks](tuple(sources), *others, b * t, d, settings, num_warps=WARPS)


def _contiguous(tensors: Sequence[Tensor]) -> Tensors:
    return [x.contiguous() for x in tensors]


@triton.jit
def rows(positions, settings):
    """Return the positions of a program, and their mask."""
    p = tl.program_id(0).to(tl.int64) * settings.positions + tl.arange(0, settings.positions)
    return p, p < positions


@triton.jit
def tile(p, mask_p, start, d, settings):
    """Return the offsets of a tile [p, columns] of the first stream of X and of y, and its mask."""
    column = start + tl.arange(0, settings.columns)
    at_x = (p * settings.n * d)[:, None] + column[None, :]
    at_y = (p * d)[:, None] + column[None, :]
    return at_x, at_y, mask_p[:, None] & (column < d)[None, :]


@triton.jit
def load_shared(ptr, row, start, d: tl.constexpr, settings):
    """Load columns of a row [d] of a tensor of `align_words`, which all positions share, as a tile in fp32.

    A vector of columns would be moved through shared memory to the threads of a tile.
    """
    if ptr.dtype.element_ty == tl.bfloat16 and settings.whole:
        # as pairs, since a number of 16 bits is converted in one instruction from a half of 32 bits, else in two
        pair = tl.zeros([settings.positions, 1], tl.int32) + tl.arange(0, settings.columns // 2)[None, :]
        pairs = tl.load(ptr.to(tl.pointer_type(tl.int32)) + (row * d + start) // 2 + pair)
        even, odd = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(even, odd), [settings.positions, settings.columns])
    column = start + tl.zeros([settings.positions, 1], tl.int32) + tl.arange(0, settings.columns)[None, :]
    return load_fp32(ptr, row * d + column, column < d)


@triton.jit
def load_tiles(x_ptr, at_x, mask, d, settings):
    """Load a tile of each stream in fp32."""
    tiles = ()
    for j in tl.static_range(settings.n):
        tiles += (load_fp32(x_ptr + at_x, j * d, mask),)
    return tiles


@triton.jit
def load_vectors(ptr, p, mask_p, COUNT: tl.constexpr):
    """Load COUNT consecutive numbers per position, as COUNT vectors over positions in fp32."""
    loaded = ()
    for c in tl.static_range(COUNT):
        loaded += (load_fp32(ptr + p * COUNT, c, mask_p),)
    return loaded


@triton.jit
def rounded(product):
    """Return a product that the compiler does not fuse with the sum that follows.

    In a sum over threads each thread would fuse its own product, and results that several threads hold would differ.
    """
    return product + 0.0


@triton.jit
def add_columns(sums, tile):
    """Add the columns of a tile to sums [p, lanes]. Each thread adds those that it has, so threads exchange nothing."""
    return sums + tl.sum(tl.reshape(tile, [sums.shape[0], sums.shape[1], tile.shape[1] // sums.shape[1]]), axis=2)


@triton.jit
def zeros(shape: tl.constexpr, COUNT: tl.constexpr):
    """Return COUNT sums of this shape."""
    sums = ()
    for _ in tl.static_range(COUNT):
        sums += (tl.zeros(shape, tl.float32),)
    return sums


@triton.jit
def load_pending(sources, at_x, at_y, mask, d, settings):
    """Load the tiles of y and, unless H_res is the identity, of X in fp32."""
    y, old = load_fp32(sources[1], at_y, mask), ()
    if not settings.identity:
        old = load_tiles(sources[0], at_x, mask, d, settings)
    return y, old


@triton.jit
def load_maps(sources, p, mask_p, settings):
    """Load the maps of a write."""
    maps = load_vectors(sources[2], p, mask_p, settings.n)
    if not settings.identity:
        maps += load_vectors(sources[3], p, mask_p, settings.n * settings.n)
    return maps


@triton.jit
def mixed_tile(sources, i, p, mask_p, at_x, mask, y, old, d, settings):
    """Return the tile of new stream i in fp32. old: the tiles of X, which the identity does not need."""
    n: tl.constexpr = settings.n
    post = tl.load(sources[2] + p * n + i, mask_p, other=0.0)[:, None]
    # a sum of two products could be fused in two ways, with different bits
    if settings.identity:
        mixed = tl.fma(tl.broadcast_to(post, y.shape), y, load_fp32(sources[0] + at_x, i * d, mask))
    else:
        mixed = post * y
        for j in tl.static_range(n):
            res = tl.load(sources[3] + p * n * n + i * n + j, mask_p, other=0.0)
            mixed = tl.fma(res[:, None], old[j], mixed)
    return mixed


@triton.jit
def write_backward(grads, grad_maps, maps, sources, grad_sources, at_x, at_y, mask, d, settings):
    """Store the gradients of the tiles of X and y, and return grad_maps with the sums over these columns.

    grads: the gradients of the tiles of X'. grad_maps: those of H_post, and of the transposed H_res.
    """
    n: tl.constexpr = settings.n
    y = load_fp32(sources[1], at_y, mask)
    grad_y = tl.zeros_like(y)
    sums = ()
    for i in tl.static_range(n):
        grad_y += maps[i][:, None] * grads[i]
        sums += (add_columns(grad_maps[i], grads[i] * y),)
    store_as(grad_sources[1], at_y, grad_y, mask)
    for j in tl.static_range(n):
        if settings.identity:
            store_as(grad_sources[0] + at_x, j * d, grads[j], mask)
        else:
            old = load_fp32(sources[0] + at_x, j * d, mask)
            grad_old = tl.zeros_like(old)
            for i in tl.static_range(n):
                grad_old += maps[n + i * n + j][:, None] * grads[i]
                sums += (add_columns(grad_maps[n + j * n + i], grads[i] * old),)
            store_as(grad_sources[0] + at_x, j * d, grad_old, mask)
    return sums


@triton.jit
def store_grad_maps(grad_sources, grad_maps, p, mask_p, settings):
    """Store the gradients of H_post, and of the transposed H_res."""
    n: tl.constexpr = settings.n
    for i in tl.static_range(n):
        store_as(grad_sources[2] + p * n, i, tl.sum(grad_maps[i], axis=1), mask_p)
        if not settings.identity:
            for j in tl.static_range(n):
                store_as(grad_sources[3] + p * n * n, i * n + j, tl.sum(grad_maps[n + j * n + i], axis=1), mask_p)


@triton.jit
def mhc_write(sources, new_ptr, positions, d: tl.constexpr, settings):
    p, mask_p = rows(positions, settings)
    at_x, at_y, mask = tile(p, mask_p, tl.program_id(1) * settings.columns, d, settings)
    y, old = load_pending(sources, at_x, at_y, mask, d, settings)
    for i in range(settings.n):
        mixed = mixed_tile(sources, i, p, mask_p, at_x, mask, y, old, d, settings)
        store_as(new_ptr + at_x, i * d, mixed, mask)
