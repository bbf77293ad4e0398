"""The dtypes in which operators compute."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import reduce

import torch
from torch import Tensor

EXACT = (torch.float32, torch.float64)


def upcast(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged if it is in fp64."""
    return x if x.dtype in EXACT else x.float()


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products of x: the autocast dtype if autocast is enabled, else that of x."""
    device_type = autocast_device(x)
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


def autocast_device(x: Tensor) -> str:
    """Return the device type whose autocast applies to x: the CPU for meta tensors, which have no autocast."""
    # torch.amp.is_autocast_available breaks the graph of torch.compile in torch 2.11
    return "cpu" if x.is_meta else x.device.type


def common_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the widest dtype of the tensors."""
    return reduce(torch.promote_types, (x.dtype for x in tensors))


def exact_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the widest dtype of the tensors, but at least fp32."""
    return torch.promote_types(common_dtype(tensors), torch.float32)


def no_autocast(x: Tensor) -> AbstractContextManager:
    """Disable autocast on the device of x, so that matrix products keep the dtype of their factors."""
    device_type = autocast_device(x)
    # entering a context takes longer than a small product, as in decoding
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()
