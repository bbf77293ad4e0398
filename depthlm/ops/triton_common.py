# mypy: allow-untyped-defs
"""Triton, and helpers that prepare tensors of heads, and lists of tensors, for its kernels.

Shapes: b batch, t tokens, h heads, e head size.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, TypeVar

import torch

# a model must be importable, and exportable, without Triton
try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("fused kernels need the package triton") from error

T = TypeVar("T")
_CURRENT: AbstractContextManager[Any] = nullcontext()


def check_heads(operator: str, heads: int, num_kv_heads: int) -> None:
    """Raise a ValueError unless the query heads are a multiple of the key/value heads."""
    if heads % num_kv_heads:
        raise ValueError(f"{operator}: {heads} query heads, must be a multiple of the {num_kv_heads} key/value heads")


def rows_of_heads(x_bhte: torch.Tensor) -> torch.Tensor:
    """Return x_bthe, contiguous. This is the layout of a projection, so usually nothing is copied."""
    return x_bhte.transpose(1, 2).contiguous()


def empty_heads(x_bhte: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an empty tensor of the shape of x_bhte whose memory layout is that of x_bthe."""
    b, h, t, e = x_bhte.shape
    return x_bhte.new_empty(b, t, h, e, dtype=dtype).transpose(1, 2)


def pad(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Repeat the last tensor up to a power of two, so that fewer lengths need a compilation of the kernel."""
    return (*tensors, *tensors[-1:] * (next_power_of_2(len(tensors)) - len(tensors)))


def cdiv(x: int, y: int) -> int:
    """Return x / y, rounded up. Triton's own takes microseconds, since kernels may call it too."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


def on_device(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context for launches on the device of x, which does nothing if that is the current one."""
    is_current = not x.is_cuda or x.device.index == torch.cuda.current_device()
    return _CURRENT if is_current else torch.cuda.device_of(x)


def split_work(count: int, most: int, multiple: int = 1) -> tuple[int, int]:
    """Return how many programs, at most `most`, share `count` units of work, and the units of each.

    The units of a program are a multiple of `multiple`.
    """
    units = multiple * cdiv(cdiv(count, most), multiple)
    return cdiv(count, units), units


def triton_type(dtype: torch.dtype) -> tl.dtype:
    """Return Triton's name of a dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


@lru_cache(maxsize=None, typed=True)
def constants(settings: type[T], *values: object) -> T:
    """Return a NamedTuple of values that are constants in the code of a kernel.

    Equal values give the same object, which a launch recognizes without comparing them in Python.
    """
    return settings(*map(tl.constexpr, values))


@triton.jit
def load_fp32(ptr, at, mask):
    """Load values as fp32, with 0 outside of the mask."""
    return tl.load(ptr + at, mask, other=0.0).to(tl.float32)


@triton.jit
def store_as(ptr, at, value, mask):
    """Store values in the dtype of the tensor."""
    tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask)
