# mypy: allow-untyped-defs, disable-error-code="assignment"
"""What `mhc_post_pre` and `hyper_post_pre` share in Triton: a pending write, the next read, and their derivatives.

The sources of a kernel are x, and output, post and res of a pending write, without res if H_res is the identity. A
program processes some positions, in chunks of columns of d. Maps, and all numbers per position, are tuples of vectors
over positions; a matrix is n^2 vectors in row-major order. The maps of a write are n vectors of H_post, then n^2 of
H_res.

Kernels compute a tensor of pointers and reach stream j by adding the scalar j * d to it; a second tensor of 64-bit
offsets would take more registers.

Shapes: b batch, t tokens, p positions (batch and tokens), n streams, i new stream, j old stream, d hidden size.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthlm.ops.autograd import call, present
from depthlm.ops.backend import expect
from depthlm.ops.dtypes import common_dtype
from depthlm.ops.library import register
from depthlm.ops.mhc.cpu import PAPER, Pending, Result
from depthlm.ops.mhc.rebuilding import mark_write, save_streams, saved_streams, written
from depthlm.ops.triton_common import (
    cdiv,
    constants,
    load_fp32,
    next_power_of_2,
    on_device,
    store_as,
    tl,
    triton,
    triton_type,
)

# positions per program, which are the rows of its matrix products: tl.dot requires 16
POSITIONS = 16
# columns per chunk of a write alone
WRITE_COLUMNS = 64
# warps of a program that writes and reads: on an H200 a forward pass takes half the time with 2 of them
FORWARD_WARPS = 2
Tensors = list[Tensor]


class Settings(NamedTuple):
    """The constants of a kernel. padded: n, padded to a power of 2. dtype: of the factors of matrix products.

    identity: whether H_res is the identity. The last four are those of `Form`.
    """

    n: tl.constexpr
    padded: tl.constexpr
    positions: tl.constexpr
    columns: tl.constexpr
    eps: tl.constexpr
    dtype: tl.constexpr
    identity: tl.constexpr
    post_scale: tl.constexpr
    pre_eps: tl.constexpr
    post_eps: tl.constexpr
    res_eps: tl.constexpr


def settings_of(
    x_btnd: Tensor, columns: int, eps: float, dtype: torch.dtype, identity: bool = False, form: Sequence[float] = PAPER
) -> Settings:
    """Return the constants of the kernels. columns: per chunk of 3 or 4 streams; fewer take 64, more take 16.

    Registers limit the columns. Up to n = 4 no register is spilled.
    """
    n, d = x_btnd.shape[2:]
    most = 64 if n <= 2 else columns if n <= 4 else 16
    columns = min(most, max(16, next_power_of_2(d)))
    padded = max(4, next_power_of_2(n))
    return constants(Settings, n, padded, POSITIONS, columns, eps, triton_type(dtype), identity, *form)


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
) -> Result:
    """Perform the pending write, if any, and the next read; return input_btd, X'_btnd, post_btn and res_btij.

    operators: two custom operators on contiguous tensors. The first one, (sources, parameters, *settings), returns
    input_btd, X'_btnd (empty without a pending write), post_btn, res_btij (unless H_res is the identity) and what the
    second one needs. The second one, (grads, sources, new, parameters, kept, *settings), returns the gradients of the
    sources and the first parameters, and a tensor with those of the others.
    """
    sources = [x_btnd, *sources_of(pending)]
    arguments = operators, settings, rebuild and pending is not None, len(sources), 3 if identity else 4
    read_btd, new_btnd, post_btn, *res_btij = call(WriteAndRead, *arguments, *sources, *parameters)
    return read_btd, x_btnd if pending is None else new_btnd, post_btn, res_btij[0] if res_btij else None


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


@register(__name__, "write_streams", lambda sources: torch.empty_like(sources[0]))
def write_streams(sources: Tensors) -> Tensor:
    """Return X'_btnd = H_res X + H_post^T y, with the same bits as `mhc_post_pre` and `hyper_post_pre` in Triton."""
    x_btnd = sources[0]
    new_btnd = torch.empty_like(x_btnd)
    settings = settings_of(x_btnd, WRITE_COLUMNS, 0.0, x_btnd.dtype, len(sources) == 3)
    launch(mhc_write, sources, new_btnd, settings, chunks=cdiv(x_btnd.shape[-1], settings.columns.value))
    return new_btnd


def empty_outputs(sources: Tensors, *shapes: list[int], identity: bool = False) -> Tensors:
    """Return the outputs of the first operator of `write_and_read`. shapes: of what the second one needs."""
    x_btnd = sources[0]
    b, t, n, d = x_btnd.shape
    outputs = [x_btnd.new_empty(b, t, d), x_btnd.new_empty(x_btnd.shape if len(sources) > 1 else 0)]
    maps_and_kept = [b, t, n], *([] if identity else [[b, t, n, n]]), *shapes
    return outputs + [x_btnd.new_empty(shape, dtype=torch.float32) for shape in maps_and_kept]


def launch(kernel: Any, sources: Tensors, *arguments: Any, chunks: int = 1, warps: int = 4) -> None:
    """Launch kernel(sources, *arguments, b * t, d, settings), where lists become tuples.

    A program processes POSITIONS positions, and one of `chunks` parts of d.
    """
    b, t, _, d = sources[0].shape
    *others, settings = (tuple(y) if isinstance(y, list) else y for y in arguments)
    with on_device(sources[0]):
        kernel[cdiv(b * t, POSITIONS), chunks](tuple(sources), *others, b * t, d, settings, num_warps=warps)


def _contiguous(tensors: Sequence[Tensor]) -> Tensors:
    return [x.contiguous() for x in tensors]


@triton.jit
def rows(positions, settings):
    """Return the positions of a program, and their mask."""
    p = tl.program_id(0).to(tl.int64) * settings.positions + tl.arange(0, settings.positions)
    return p, p < positions


@triton.jit
def tile(p, mask_p, start, d, settings):
    """Return the columns of a chunk, their mask, the offsets of a tile [p, columns] of X and of y, and its mask.

    The offsets are those of the first stream of X.
    """
    column = start + tl.arange(0, settings.columns)
    at_x = (p * settings.n * d)[:, None] + column[None, :]
    at_y = (p * d)[:, None] + column[None, :]
    return column, column < d, at_x, at_y, mask_p[:, None] & (column < d)[None, :]


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
def zeros(shape: tl.constexpr, COUNT: tl.constexpr):
    """Return COUNT sums of this shape."""
    sums = ()
    for _ in tl.static_range(COUNT):
        sums += (tl.zeros(shape, tl.float32),)
    return sums


@triton.jit
def load_maps(sources, p, mask_p, settings):
    """Load the maps of a write."""
    maps = load_vectors(sources[2], p, mask_p, settings.n)
    if not settings.identity:
        maps += load_vectors(sources[3], p, mask_p, settings.n * settings.n)
    return maps


@triton.jit
def mixed_tile(i: tl.constexpr, old, y, maps, settings):
    """Return the tile of new stream i in fp32."""
    # a sum of two products could be fused in two ways, with different bits
    if settings.identity:
        mixed = tl.fma(tl.broadcast_to(maps[i][:, None], y.shape), y, old[i])
    else:
        mixed = maps[i][:, None] * y
        for j in tl.static_range(settings.n):
            mixed = tl.fma(maps[settings.n + i * settings.n + j][:, None], old[j], mixed)
    return mixed


@triton.jit
def read_streams(read_ptr, x_ptr, pre, p, mask_p, d, settings):
    """Store H_pre X. The last columns come first, because those that were loaded last are still in the cache."""
    last = (d - 1) // settings.columns * settings.columns
    for back in range(0, d, settings.columns):
        _, _, at_x, at_y, mask = tile(p, mask_p, last - back, d, settings)
        tiles = load_tiles(x_ptr, at_x, mask, d, settings)
        read = tl.zeros(mask.shape, tl.float32)
        for j in tl.static_range(settings.n):
            read += pre[j][:, None] * tiles[j]
        store_as(read_ptr, at_y, read, mask)


@triton.jit
def pre_gradient(grad_read_ptr, x_ptr, p, mask_p, d, settings):
    """Return the gradient of H_pre in a read of the streams x."""
    grad_pre = zeros(p.shape, settings.n)
    for start in range(0, d, settings.columns):
        _, _, at_x, at_y, mask = tile(p, mask_p, start, d, settings)
        grad_read = load_fp32(grad_read_ptr, at_y, mask)
        sums = ()
        for j in tl.static_range(settings.n):
            sums += (grad_pre[j] + tl.sum(grad_read * load_fp32(x_ptr + at_x, j * d, mask), axis=1),)
        grad_pre = sums
    return grad_pre


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
        sums += (grad_maps[i] + tl.sum(grads[i] * y, axis=1),)
    store_as(grad_sources[1], at_y, grad_y, mask)
    for j in tl.static_range(n):
        if settings.identity:
            store_as(grad_sources[0] + at_x, j * d, grads[j], mask)
        else:
            old = load_fp32(sources[0] + at_x, j * d, mask)
            grad_old = tl.zeros_like(old)
            for i in tl.static_range(n):
                grad_old += maps[n + i * n + j][:, None] * grads[i]
                sums += (grad_maps[n + j * n + i] + tl.sum(grads[i] * old, axis=1),)
            store_as(grad_sources[0] + at_x, j * d, grad_old, mask)
    return sums


@triton.jit
def store_grad_maps(grad_sources, grad_maps, p, mask_p, settings):
    """Store the gradients of H_post, and of the transposed H_res."""
    n: tl.constexpr = settings.n
    for i in tl.static_range(n):
        store_as(grad_sources[2] + p * n, i, grad_maps[i], mask_p)
        if not settings.identity:
            for j in tl.static_range(n):
                store_as(grad_sources[3] + p * n * n, i * n + j, grad_maps[n + j * n + i], mask_p)


@triton.jit
def mhc_write(sources, new_ptr, positions, d, settings):
    p, mask_p = rows(positions, settings)
    _, _, at_x, at_y, mask = tile(p, mask_p, tl.program_id(1) * settings.columns, d, settings)
    maps = load_maps(sources, p, mask_p, settings)
    y = load_fp32(sources[1], at_y, mask)
    old = load_tiles(sources[0], at_x, mask, d, settings)
    for i in tl.static_range(settings.n):
        store_as(new_ptr + at_x, i * d, mixed_tile(i, old, y, maps, settings), mask)
