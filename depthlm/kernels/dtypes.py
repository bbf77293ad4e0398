"""The number formats in which operators compute."""

import torch
from torch import Tensor

EXACT = (torch.float32, torch.float64)


def upcast(x: Tensor) -> Tensor:
    """x in fp32, or as it is in fp64."""
    return x if x.dtype in EXACT else x.float()


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type matrix products of x run in: autocast's where it is on, else that of x."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)
