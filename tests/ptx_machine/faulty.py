"""Kernels with a fault that a constant removes."""

import triton
import triton.language as tl


@triton.jit
def exchange(x_ptr, y_ptr, B: tl.constexpr, BARRIER: tl.constexpr):
    """Each thread reads what another one has written."""
    c = tl.arange(0, B)
    tl.store(y_ptr + c, tl.load(x_ptr + c) * 2)
    if BARRIER:
        tl.debug_barrier()
    tl.store(y_ptr + B + c, tl.load(y_ptr + B - 1 - c))


@triton.jit
def overwrite(x_ptr, B: tl.constexpr, BARRIER: tl.constexpr):
    """Each thread overwrites what another one reads."""
    c = tl.arange(0, B)
    x = tl.load(x_ptr + B - 1 - c)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x_ptr + c, x)


@triton.jit
def scale(x_ptr, y_ptr, n, B: tl.constexpr, WRONG: tl.constexpr):
    c = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y_ptr + c, tl.load(x_ptr + c, c <= n if WRONG else c < n, other=0.0) * 2, c < n)


@triton.jit
def store_all(y_ptr, n, B: tl.constexpr, WRONG: tl.constexpr):
    c = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y_ptr + c, c, c < (n + 3 if WRONG else n))


@triton.jit
def total(x_ptr, y_ptr, B: tl.constexpr, APART: tl.constexpr):
    """All programs add to one number, or each to its own."""
    s = tl.sum(tl.load(x_ptr + tl.program_id(0) * B + tl.arange(0, B)), axis=0)
    at = tl.program_id(0) if APART else 0
    tl.store(y_ptr + at, tl.load(y_ptr + at) + s)


@triton.jit
def row_sums(x_ptr, y_ptr, width, B: tl.constexpr, OTHER: tl.constexpr):
    """Sums with a padded tail."""
    c = tl.arange(0, B)
    if OTHER:
        x = tl.load(x_ptr + tl.program_id(0) * width + c, c < width, other=0.0)
    else:
        x = tl.load(x_ptr + tl.program_id(0) * width + c, c < width)
    tl.store(y_ptr + tl.program_id(0), tl.sum(x + 1.0, axis=0) - (B if OTHER else width))


@triton.jit
def far(x_ptr, y_ptr, stride, B: tl.constexpr, WIDE: tl.constexpr):
    """Rows so far apart that offsets do not fit into 32 bits."""
    row = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    tl.store(y_ptr + tl.program_id(0) * B + tl.arange(0, B), tl.load(x_ptr + row * stride + tl.arange(0, B)))


@triton.jit
def unwritten(y_ptr, out_ptr, B: tl.constexpr, WRITTEN: tl.constexpr):
    c = tl.arange(0, B)
    if WRITTEN:
        tl.store(y_ptr + c, 1.0)
    else:
        tl.store(y_ptr + c, 1.0, c > 0)
    tl.debug_barrier()
    tl.store(out_ptr, tl.sum(tl.load(y_ptr + c), axis=0))
