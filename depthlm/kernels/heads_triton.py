# mypy: allow-untyped-defs
"""Tensors of heads, and tuples of them, as Triton kernels take them.

Shapes: b batch, t tokens, h heads, e head size.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("fused kernels need the package triton") from error


def rows_of_heads(x_bhte: torch.Tensor) -> torch.Tensor:
    """x_bthe, contiguous: as projections give it, so mostly no copy."""
    return x_bhte.transpose(1, 2).contiguous()


def empty_heads(x_bhte: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """As a kernel's result that lies as x_bthe."""
    b, h, t, e = x_bhte.shape
    return x_bhte.new_empty(b, t, h, e, dtype=dtype).transpose(1, 2)


def padded(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """To a power of two, by repeating the last, so that one compilation serves several numbers of tensors."""
    return (*tensors, *tensors[-1:] * (triton.next_power_of_2(len(tensors)) - len(tensors)))


@triton.jit
def load_fp32(ptr, at, inside):
    """In fp32, 0 outside."""
    return tl.load(ptr + at, inside, other=0.0).to(tl.float32)
