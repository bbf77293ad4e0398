"""The number formats in which operators compute."""

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

EXACT = (torch.float32, torch.float64)


def upcast(x: Tensor) -> Tensor:
    """x in fp32, or as it is in fp64."""
    return x if x.dtype in EXACT else x.float()


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type matrix products of x run in: autocast's where it is on, else that of x."""
    kind = autocast_device(x)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def autocast_device(x: Tensor) -> str:
    """The kind of device whose autocast holds for x: the CPU's where that of x has none, as meta."""
    return x.device.type if torch.amp.is_autocast_available(x.device.type) else "cpu"


def common_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The widest of their types."""
    return reduce(torch.promote_types, (x.dtype for x in tensors))


def exact_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The widest of their types, fp32 at least."""
    return torch.promote_types(common_dtype(tensors), torch.float32)


def no_autocast(x: Tensor) -> torch.autocast:
    """Inside, products of matrices are in the type of their factors."""
    return torch.autocast(autocast_device(x), enabled=False)
