# mypy: allow-untyped-defs, disable-error-code="assignment"
"""What the Triton kernels of reads over depth share: a table of sources, tiles of a source, and products with them.

A table contains the address and the dtype of each source, so one compiled kernel supports any number and any mixture
of 16-bit and fp32 sources. A tile of one source has some positions and WIDTH dimensions. A program that has such a tile
of each read in registers loads each tile of a source once for all reads. A tile of several sources has a row for each
of them, and is a factor of a matrix product.

Shapes: s reads, n sources, p positions, d width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthlm.ops.autograd import attach
from depthlm.ops.backend import interpreted
from depthlm.ops.tiles import tiles_of
from depthlm.ops.triton_common import cdiv, constants, load_fp32, on_device, store_as, tl, triton, triton_type

# reads of a tensor-core product, whose sides have at least 16 entries
DOT_READS = tl.constexpr(16)
_TILES = tiles_of("reads")
# with 8 warps, a thread has 8 values of a tile: one 128-bit load of a 16-bit source
ROWS, WIDTH, WARPS = tl.constexpr(_TILES["ROWS"]), tl.constexpr(_TILES["WIDTH"]), _TILES["WARPS"]
# factors of a matrix product: sources in bf16; in several dtypes, split into two parts in bf16; in fp32
BFLOAT16, MIXED, EXACT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(3)
# the interpreter computes wrong products in bf16
PART = tl.constexpr(tl.float32 if interpreted() else tl.bfloat16)
# sources whose addresses are arguments of one launch
ADDRESSES = 16
# numbers that vary from launch to launch: to specialize on them would compile a kernel again
COUNTS = ["n", "positions", "reads", "rows", "started", "biased", "given_lse", "first", "wide", "added"]


class Settings(NamedTuple):
    """Constants of the kernels. D: d. NARROW: the dtype of 16-bit sources. KIND: of the sources (`load_typed`)."""

    D: tl.constexpr
    NARROW: tl.constexpr
    KIND: tl.constexpr


class Inputs(NamedTuple):
    """What the kernels of a group of reads get of its sources. It must live until the last launch.

    sources: aligned; kept here because the table has only their addresses. sizes: n, positions, reads. settings:
    constants of the kernels. tiles: the grid of a program per tile.
    """

    sources: list[Tensor]
    table: Tensor
    sizes: tuple[int, int, int]
    settings: Settings
    tiles: tuple[int, int]

    def launch(self, kernel, grid, warps, tensors, *numbers, **settings) -> None:
        """Launch a kernel with these tensors, the sizes, and then more numbers and settings."""
        with on_device(self.table):
            kernel[grid](*tensors, *self.sizes, *numbers, self.settings, **settings, num_warps=warps)


def inputs_of(
    sources: Sequence[Tensor], reads: int, grads: Sequence[Tensor] = (), added: Sequence[bool] = ()
) -> Inputs:
    """Return the inputs of a group of reads, for a backward pass with the gradients as in `table_of`."""
    xs, d = [align(x) for x in sources], sources[0].shape[-1]
    positions = sources[0].numel() // d
    tiles = cdiv(positions, ROWS.value), cdiv(d, WIDTH.value)
    settings = constants(Settings, d, narrow_dtype(xs), kind_of(xs))
    return Inputs(xs, table_of(xs, grads, added), (len(xs), positions, reads), settings, tiles)


def align(x: Tensor) -> Tensor:
    """Return x, contiguous and at an address that is a multiple of 16 bytes, as the kernels load it."""
    x = x.contiguous()
    offset = x.storage_offset()
    return x.clone() if offset and offset * x.element_size() % 16 else x


def table_of(sources: Sequence[Tensor], grads: Sequence[Tensor] = (), added: Sequence[bool] = ()) -> Tensor:
    """Return a row per source: its address, that of its gradient, and flags.

    Bit 0 of the flags: the source is fp32. Bit 1: the gradient is added to what is at its address (`added`).
    """
    table = sources[0].new_empty(len(sources), 3, dtype=torch.int64)
    with on_device(table):
        for i in range(0, len(sources), ADDRESSES):
            part = slice(i, i + ADDRESSES)
            reads_write_table[(1,)](
                *addresses(sources[part], grads[part], added[part]), table, i, len(sources), num_warps=1
            )
    return table


def addresses(
    sources: Sequence[Tensor], grads: Sequence[Tensor] = (), added: Sequence[bool] = ()
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], int, int]:
    """Return the arguments of a launch for up to ADDRESSES sources: pointers to them and to their gradients, flags.

    Bit j of the flags: source j is fp32; the gradient of source j is added to what is at its address (`added`).
    """
    wide = sum((x.dtype == torch.float32) << j for j, x in enumerate(sources))
    if not grads:
        # all forward passes that read a source share its view, which is detached, so that it does not keep x alive
        pointers = _pointers([attach(x, "as_bytes", lambda x: x.detach().view(torch.uint8)) for x in sources])
        return pointers, pointers, wide, 0
    x_ptrs, grad_ptrs = (_pointers([x.view(torch.uint8) for x in tensors]) for tensors in (sources, grads))
    return x_ptrs, grad_ptrs, wide, sum(flag << j for j, flag in enumerate(added))


def _pointers(views: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the views, which are bytes and are repeated up to ADDRESSES, so that a kernel is compiled once."""
    return (*views, *views[-1:] * (ADDRESSES - len(views)))


def kind_of(sources: Sequence[Tensor]) -> int:
    """Return how the kernels load these tensors, and store them as factors of matrix products (`load_parts`)."""
    dtypes = {x.dtype for x in sources}
    return (EXACT if dtypes == {torch.float32} else BFLOAT16 if dtypes == {torch.bfloat16} else MIXED).value


def narrow_dtype(sources: Sequence[Tensor]) -> Any:
    """Return Triton's name of the dtype of the 16-bit sources."""
    return triton_type(next((x.dtype for x in sources if x.dtype != torch.float32), torch.bfloat16))


@triton.jit(do_not_specialize=COUNTS)
def reads_write_table(x_ptrs, grad_ptrs, wide, added, table_ptr, first, n):
    for k in tl.static_range(len(x_ptrs)):
        if first + k < n:
            at = (first + k) * 3
            tl.store(table_ptr + at, tl.cast(x_ptrs[k], tl.int64))
            tl.store(table_ptr + at + 1, tl.cast(grad_ptrs[k], tl.int64))
            tl.store(table_ptr + at + 2, tl.cast(((wide >> k) & 1) + ((added >> k) & 1) * 2, tl.int64))


@triton.jit
def pointers(address, NARROW: tl.constexpr):
    """Return an address as a pointer of each dtype."""
    # the compiler learns here that it may load 128 bits at once
    narrow_ptr = tl.multiple_of(tl.cast(address, tl.pointer_type(NARROW)), 16)
    return narrow_ptr, tl.multiple_of(tl.cast(address, tl.pointer_type(tl.float32)), 16)


@triton.jit
def load_typed(ptrs, wide, at, mask, KIND: tl.constexpr):
    """Load a tile of a source as fp32, with 0 outside of the mask. wide: whether a source of kind MIXED is fp32."""
    narrow_ptr, wide_ptr = ptrs
    if KIND == BFLOAT16:
        x = load_fp32(narrow_ptr, at, mask)
    elif KIND == EXACT:
        x = load_fp32(wide_ptr, at, mask)
    else:
        x = load_fp32(narrow_ptr, at, mask & (wide == 0)) + load_fp32(wide_ptr, at, mask & (wide != 0))
    return x


@triton.jit
def store_typed(ptrs, wide, added, at, grad, mask, KIND: tl.constexpr):
    """Store a tile of the gradient of a source, or add it to what is stored there."""
    narrow_ptr, wide_ptr = ptrs
    grad += load_typed(ptrs, wide, at, mask & (added != 0), KIND)
    if KIND == BFLOAT16:
        store_as(narrow_ptr, at, grad, mask)
    elif KIND == EXACT:
        store_as(wide_ptr, at, grad, mask)
    else:
        store_as(narrow_ptr, at, grad, mask & (wide == 0))
        store_as(wide_ptr, at, grad, mask & (wide != 0))


@triton.jit
def load_source(table_ptr, j, at, mask, SETTINGS):
    """Load a tile of source j of a table."""
    row_ptr = table_ptr + j * 3
    return load_typed(pointers(tl.load(row_ptr), SETTINGS.NARROW), tl.load(row_ptr + 2) & 1, at, mask, SETTINGS.KIND)


@triton.jit
def store_grad(table_ptr, j, at, grad, mask, SETTINGS):
    """Store a tile of the gradient of source j of a table."""
    row_ptr = table_ptr + j * 3
    flags = tl.load(row_ptr + 2)
    ptrs = pointers(tl.load(row_ptr + 1), SETTINGS.NARROW)
    store_typed(ptrs, flags & 1, flags & 2, at, grad, mask, SETTINGS.KIND)


@triton.jit
def rows_of(table_ptr, column: tl.constexpr, j, n, NARROW: tl.constexpr):
    """Return pointers of each dtype to sources j, or with column 1 to their gradients, as rows [n, 1], and flags."""
    narrow_ptr, wide_ptr = pointers(tl.load(table_ptr + j * 3 + column, j < n, other=0), NARROW)
    return (narrow_ptr[:, None], wide_ptr[:, None]), tl.load(table_ptr + j * 3 + 2, j < n, other=0)[:, None]


@triton.jit
def load_parts(ptrs, flags, at, mask, KIND: tl.constexpr):
    """Load a tile with a row per source as parts: of kind MIXED two in bf16, whose sum has 16 bits of precision.

    BFLOAT16: all sources are in bf16; EXACT: all are in fp32. Then the first part is everything.
    """
    if KIND == BFLOAT16:
        high = tl.load(ptrs[0] + at, mask, other=0.0).to(PART)
        low = high
    elif KIND == EXACT:
        high = tl.load(ptrs[1] + at, mask, other=0.0)
        low = high
    else:
        high, low = parts_of(load_typed(ptrs, flags & 1, at, mask, MIXED), MIXED)
    return high, low


@triton.jit
def parts_of(x, KIND: tl.constexpr):
    """Return the parts of a tensor in fp32."""
    high = x.to(PART) if KIND != EXACT else x
    return high, (x - high.to(tl.float32)).to(high.dtype)


@triton.jit
def transposed(parts):
    """Return the transposed parts of a matrix."""
    return tl.trans(parts[0]), tl.trans(parts[1])


@triton.jit
def whole(parts, KIND: tl.constexpr):
    """Return the sum of parts in fp32."""
    x = parts[0].to(tl.float32)
    return x + parts[1].to(tl.float32) if KIND == MIXED else x


@triton.jit
def product(x, y, total, X: tl.constexpr, Y: tl.constexpr):
    """Return x @ y + total in fp32 for the parts of two matrices. X, Y: their kinds; both or none are EXACT."""
    if X == EXACT:
        total = tl.dot(x[0], y[0], total, input_precision="tf32x3")
    else:
        total = tl.dot(x[0], y[0], total)
        if X == MIXED:
            total = tl.dot(x[1], y[0], total)
        if Y == MIXED:
            total = tl.dot(x[0], y[1], total)
    return total


@triton.jit
def tile_at(p, c, positions, D: tl.constexpr):
    """Return the offsets of a tile of positions and dimensions in a tensor x_pd, and its mask."""
    mask = (p < positions)[:, None] & (c < D)[None, :]
    return tl.cast(p, tl.int64)[:, None] * D + c[None, :], mask


@triton.jit
def tile_of_program(positions, D: tl.constexpr, HEIGHT: tl.constexpr):
    """Return positions, dimensions, offsets and mask of the tile of a program, whose grid is over both."""
    p = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at, mask = tile_at(p, c, positions, D)
    return p, c, at, mask


@triton.jit
def load_reads(ptr, at, mask, positions, reads, D: tl.constexpr, COUNT: tl.constexpr):
    """Load a tile of each read from a tensor x_spd as fp32, with 0 for those that the launch lacks of COUNT."""
    tiles = ()
    for s in tl.static_range(COUNT):
        tiles += (load_fp32(ptr, tl.cast(positions, tl.int64) * (s * D) + at, mask & (s < reads)),)
    return tiles


@triton.jit
def store_reads(ptr, at, tiles, mask, positions, reads, D: tl.constexpr, COUNT: tl.constexpr):
    """Store a tile of each read into a tensor x_spd."""
    for s in tl.static_range(COUNT):
        store_as(ptr, tl.cast(positions, tl.int64) * (s * D) + at, tiles[s], mask & (s < reads))
