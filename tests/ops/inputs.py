"""Random inputs of the operators, and comparisons of their results."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# in Triton's interpreter, programs run one after the other
in_parallel = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal float64 numbers that require a gradient, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def single(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal fp32 numbers, the same for the same seed, on the GPU if there is one."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def low(inputs: list[Tensor], kind: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs in a dtype, and the same rounded numbers in fp64."""
    rounded = [x.to(kind) for x in inputs]
    return rounded, [x.double() for x in rounded]


def assert_close(names: Iterable[str], found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Compare tensors. The tolerance is relative to the largest number of each tensor."""
    for name, x, y in zip(names, found, expected, strict=False):
        assert (x.double() - y).abs().max() <= tolerance * max(1.0, y.abs().max().item()), name
