"""Helpers of operators with hand-written backward passes: calls, names for registration, and chunks of work."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# values of a source per chunk: the chunks of 8 to 16 sources and reads fit into a CPU's cache
CHUNK = 2**16
GPU_CHUNK = 2**24


class NoContext:
    """A context for a forward pass without a backward pass. It saves nothing."""

    def save_for_backward(self, *tensors: Any) -> None:
        """Do nothing."""

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing."""


def operator_name(module: str, name: str) -> str:
    """Return the name to register an operator under. It contains the module, so that exported copies do not collide."""
    return f"{re.sub(r'[^0-9A-Za-z_]', '_', module.rpartition('.')[0] or module)}::{name}"


def call(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call an operator. Without gradients this skips `apply`, whose overhead is noticeable when decoding a token."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(NoContext(), *arguments)


def parts(rows: int, step: int, x: Tensor) -> Iterator[slice]:
    """Yield slices of `step` rows. If x is on the meta device, yield only the first one.

    A meta run only measures memory, and every slice needs the same.
    """
    return (slice(i, i + step) for i in range(0, min(rows, step) if x.is_meta else rows, step))


def chunks(positions: int, d: int, x: Tensor) -> Iterator[slice]:
    """Yield the chunks of positions that a read over depth processes at a time."""
    return parts(positions, max(1, (CHUNK if x.is_cpu else GPU_CHUNK) // d), x)


def stacked(sources_pd: Sequence[Tensor], part: slice, dtype: torch.dtype, dim: int = 0) -> Tensor:
    """Return a chunk of all sources in one dtype."""
    return torch.stack([x_pd[part].to(dtype) for x_pd in sources_pd], dim)


def present(*tensors: Tensor | None) -> list[Tensor]:
    """Return the tensors that are not None."""
    return [x for x in tensors if x is not None]
