"""Random inputs of the operators."""

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal float64 numbers that require a gradient, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
