# mypy: allow-untyped-defs, disable-error-code="assignment"
"""What the Triton kernels of reads over depth share: a table of sources, tiles of a source, and scores.

A table contains the address and the dtype of each source, so one compiled kernel supports any number and any mixture
of 16-bit and fp32 sources. A tile has TILE_ROWS positions and TILE_WIDTH dimensions. A program has one tile of each
read in registers, so that each tile of a source is loaded once for all reads.

Shapes: s reads, n sources, p positions, d width. A tile: R positions, C dimensions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthlm.ops.backend import expect
from depthlm.ops.dtypes import common_dtype
from depthlm.ops.triton_common import tl, triton

# reads of a launch: the code of a kernel is unrolled over them, and those that a launch lacks are skipped
MAX_READS = 8
# reads of a tensor-core product, whose sides have at least 16 entries
DOT_READS = 16
# with 8 warps, a thread has 8 values of a tile: one 128-bit load of a 16-bit source
TILE_ROWS, TILE_WIDTH, WARPS = 32, 64, 8
# half a tile, for programs that need more registers: 4 warps on the same number of values per thread
HALF_ROWS, FEW_WARPS = 16, 4
# positions and dimensions of a tile of the scores
SCORE_ROWS, SCORE_WIDTH = 64, 64
# sources whose addresses are arguments of one launch
ADDRESSES = 16
# programs over positions of a backward pass, each with its own partial sums
PROGRAMS = 64
NARROW = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# arguments that vary from read to read
COUNTS = ["n", "positions", "reads", "rows", "steps", "started", "biased", "given_lse", "first", "wide", "added"]


def one_narrow_dtype(sources: Sequence[Tensor]) -> list[Tensor]:
    """Return the sources in fp32 if they mix fp16 and bf16, else unchanged. The result is fp32 in both cases."""
    mixed = {torch.float16, torch.bfloat16} <= {x.dtype for x in sources}
    return [x.float() if mixed else x for x in sources]


def aligned(x: Tensor) -> Tensor:
    """Return x, contiguous and at an address that is a multiple of 16 bytes, as the kernels load it."""
    x = x.contiguous()
    return x.clone() if x.storage_offset() * x.element_size() % 16 else x


def table_of(sources: Sequence[Tensor], grads: Sequence[Tensor] = (), added: Sequence[bool] = ()) -> Tensor:
    """Return a row per source: its address, that of its gradient, and flags.

    Bit 0 of the flags: the source is fp32. Bit 1: the gradient is added to what is at its address (`added`).
    """
    table = sources[0].new_empty(len(sources), 3, dtype=torch.int64)
    with torch.cuda.device_of(table):
        for i in range(0, len(sources), ADDRESSES):
            part = slice(i, i + ADDRESSES)
            _write_table[(1,)](*addresses(sources[part], grads[part], added[part]), table, i, len(sources), num_warps=1)
    return table


def addresses(
    sources: Sequence[Tensor], grads: Sequence[Tensor] = (), added: Sequence[bool] = ()
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], int, int]:
    """Return the arguments of a launch for up to ADDRESSES sources: pointers to them and to their gradients, flags.

    Bit j of the flags: source j is fp32; the gradient of source j is added to what is at its address (`added`).
    """
    wide = sum((x.dtype == torch.float32) << j for j, x in enumerate(sources))
    return _pointers(sources), _pointers(grads or sources), wide, sum(flag << j for j, flag in enumerate(added))


def _pointers(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors as bytes, repeated up to ADDRESSES, so that a kernel is compiled once."""
    views = [x.view(torch.uint8) for x in tensors]
    return (*views, *views[-1:] * (ADDRESSES - len(views)))


def narrow_dtype(sources: Sequence[Tensor]) -> Any:
    """Return Triton's name of the dtype of the 16-bit sources."""
    return NARROW.get(next((x.dtype for x in sources if x.dtype in NARROW), torch.bfloat16))


def scores(
    query: Tensor, table: Tensor, sources: Sequence[Tensor], reads: int, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Return the products raw_nsp of sources and queries, and the scale_np of a source: 1 / rms(x), or 1 without eps.

    query: [s, d], or [s, n, d] with a query for each source, for which no scale is computed.
    """
    d, n = sources[0].shape[-1], len(sources)
    positions = sources[0].numel() // d
    raw = table.new_empty(n, reads, positions, dtype=torch.float32)
    scale = raw if query.ndim == 3 else table.new_empty(n, positions, dtype=torch.float32)
    settings = {"PER_SOURCE": query.ndim == 3, "EPS": eps or 0.0, "NORMED": eps is not None}
    with torch.cuda.device_of(table):
        _scores[(triton.cdiv(positions, SCORE_ROWS), n)](
            table, query, raw, scale, n, positions, reads, D=d, R=SCORE_ROWS, C=SCORE_WIDTH, S=DOT_READS,
            NARROW=narrow_dtype(sources), **settings, num_warps=FEW_WARPS,
        )  # fmt: skip
    return raw, scale


def row_programs(positions: int) -> tuple[int, int]:
    """Return the programs over positions of a backward pass, and the positions of each, a multiple of HALF_ROWS."""
    rows = HALF_ROWS * triton.cdiv(triton.cdiv(positions, PROGRAMS), HALF_ROWS)
    return triton.cdiv(positions, rows), rows


def in_groups(reads: int) -> list[slice]:
    """Return the groups of at most MAX_READS reads."""
    return [slice(i, i + MAX_READS) for i in range(0, reads, MAX_READS)]


def of_group(x: Tensor, group: slice) -> Tensor:
    """Slice the reads of one group. With a single group, return x itself, so that autograd copies no gradient."""
    return x if len(x) <= group.stop - group.start else x[group]


def joined(outputs: list[Tensor]) -> Tensor:
    """Return the outputs of the groups of reads as one tensor."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def check_reads(operator: str, parameter: Tensor, sources: Sequence[Tensor], start_spd: Tensor | None) -> None:
    """Check that the sources have one shape, and that the start has it for each read of a parameter."""
    shape = sources[0].shape
    expect(operator, parameter, **{f"source {j}": (x, shape) for j, x in enumerate(sources)})
    if start_spd is not None:
        expect(operator, parameter, start=(start_spd, (len(parameter), *shape)))


def widest(sources: Sequence[Tensor], start: Tensor | None) -> torch.dtype:
    """Return the dtype of a result."""
    return common_dtype([*sources, *([] if start is None else [start])])


@triton.jit(do_not_specialize=COUNTS)
def _write_table(x_ptrs, grad_ptrs, wide, added, table_ptr, first, n):
    for k in tl.static_range(len(x_ptrs)):
        if first + k < n:
            at = (first + k) * 3
            tl.store(table_ptr + at, tl.cast(x_ptrs[k], tl.int64))
            tl.store(table_ptr + at + 1, tl.cast(grad_ptrs[k], tl.int64))
            tl.store(table_ptr + at + 2, tl.cast(((wide >> k) & 1) + ((added >> k) & 1) * 2, tl.int64))


@triton.jit
def address(ptrs, j):
    """Return the address of tensor j of a tuple of pointers."""
    found = tl.cast(ptrs[0], tl.int64)
    for k in tl.static_range(1, len(ptrs)):
        found = tl.where(j == k, tl.cast(ptrs[k], tl.int64), found)
    return found


@triton.jit
def _typed(address, NARROW: tl.constexpr):
    """Return an address as a pointer of each dtype."""
    # the compiler learns here that it may load 128 bits at once
    narrow_ptr = tl.multiple_of(tl.cast(address, tl.pointer_type(NARROW)), 16)
    return narrow_ptr, tl.multiple_of(tl.cast(address, tl.pointer_type(tl.float32)), 16)


@triton.jit
def load_at(address, wide, at, inside, NARROW: tl.constexpr):
    """Load a tile of a source as fp32, with 0 outside of the mask. wide: whether the source is fp32."""
    narrow_ptr, wide_ptr = _typed(address, NARROW)
    narrow = tl.load(narrow_ptr + at, inside & (wide == 0), other=0.0).to(tl.float32)
    return narrow + tl.load(wide_ptr + at, inside & (wide != 0), other=0.0)


@triton.jit
def store_at(address, wide, added, at, grad, inside, NARROW: tl.constexpr):
    """Store a tile of the gradient of a source, or add it to what is stored there."""
    narrow_ptr, wide_ptr = _typed(address, NARROW)
    of_narrow, of_wide = inside & (wide == 0), inside & (wide != 0)
    grad += tl.load(narrow_ptr + at, of_narrow & (added != 0), other=0.0).to(tl.float32)
    grad += tl.load(wide_ptr + at, of_wide & (added != 0), other=0.0)
    tl.store(narrow_ptr + at, grad.to(NARROW), of_narrow)
    tl.store(wide_ptr + at, grad, of_wide)


@triton.jit
def load_source(table_ptr, j, at, inside, NARROW: tl.constexpr):
    """Load a tile of source j of a table."""
    row_ptr = table_ptr + j * 3
    return load_at(tl.load(row_ptr), tl.load(row_ptr + 2) & 1, at, inside, NARROW)


@triton.jit
def store_grad(table_ptr, j, at, grad, inside, NARROW: tl.constexpr):
    """Store a tile of the gradient of source j of a table."""
    row_ptr = table_ptr + j * 3
    flags = tl.load(row_ptr + 2)
    store_at(tl.load(row_ptr + 1), flags & 1, flags & 2, at, grad, inside, NARROW)


@triton.jit
def zeros_of_reads(S: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Return a tile of zeros for each read."""
    tiles = ()
    for _ in tl.static_range(S):
        tiles += (tl.zeros([R, C], tl.float32),)
    return tiles


@triton.jit
def load_reads(ptr, at, inside, positions, reads, D: tl.constexpr, S: tl.constexpr):
    """Load a tile of each read from a tensor x_spd as fp32."""
    tiles = ()
    for s in tl.static_range(S):
        tile = tl.zeros(at.shape, tl.float32)
        if s < reads:
            tile = tl.load(ptr + tl.cast(positions, tl.int64) * (s * D) + at, inside, other=0.0).to(tl.float32)
        tiles += (tile,)
    return tiles


@triton.jit
def store_reads(ptr, at, tiles, inside, positions, reads, D: tl.constexpr, S: tl.constexpr):
    """Store a tile of each read into a tensor x_spd."""
    for s in tl.static_range(S):
        if s < reads:
            out = tiles[s].to(ptr.dtype.element_ty)
            tl.store(ptr + tl.cast(positions, tl.int64) * (s * D) + at, out, inside)


@triton.jit(do_not_specialize=COUNTS)
def _scores(
    table_ptr, query_ptr, raw_ptr, scale_ptr, n, positions, reads, D: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, S: tl.constexpr, NARROW: tl.constexpr, PER_SOURCE: tl.constexpr, EPS: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(1)
    p = tl.program_id(0) * R + tl.arange(0, R)
    s = tl.arange(0, S)
    query_at = (s * n + j) * D if PER_SOURCE else s * D
    products = tl.zeros([R, S], tl.float32)
    squares = tl.zeros([R], tl.float32)
    for first in range(0, D, C):
        c = first + tl.arange(0, C)
        x = load_source(
            table_ptr, j, tl.cast(p, tl.int64)[:, None] * D + c[None, :],
            (p < positions)[:, None] & (c < D)[None, :], NARROW,
        )  # fmt: skip
        inside = (s < reads)[:, None] & (c < D)[None, :]
        query = tl.load(query_ptr + query_at[:, None] + c[None, :], inside, other=0.0).to(tl.float32)
        products = tl.dot(x, tl.trans(query), products, input_precision="tf32x3")
        if NORMED:
            squares += tl.sum(x * x, axis=1)
    at = ((j * reads + s) * positions)[None, :] + p[:, None]
    tl.store(raw_ptr + at, products, (p < positions)[:, None] & (s < reads)[None, :])
    if not PER_SOURCE:
        scale = tl.rsqrt(squares / D + EPS) if NORMED else tl.full([R], 1.0, tl.float32)
        tl.store(scale_ptr + j * positions + p, scale, p < positions)
