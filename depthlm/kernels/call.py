"""How an operator with a backward pass of its own is called, what it is registered as, and how it divides its work."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class NoContext:
    """What a forward pass saves is dropped."""

    def save_for_backward(self, *tensors: Any) -> None:
        """Nothing is saved."""


def operator_name(module: str, name: str) -> str:
    """Of a registered operator of a module: copies of this code, as exports are, have operators of their own."""
    return f"{re.sub(r'[^0-9A-Za-z_]', '_', module.rpartition('.')[0] or module)}::{name}"


def call(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """The operator's result; without a gradient its forward pass alone: `apply` is a good part of a decoded token."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(NoContext(), *arguments)


def parts(rows: int, step: int, x: Tensor) -> Iterator[slice]:
    """The rows that are worked on at a time. Where x is on meta the first `step` only: each part takes the same memory,
    which is all that can be asked there."""
    return (slice(i, i + step) for i in range(0, min(rows, step) if x.is_meta else rows, step))


def present(*tensors: Tensor | None) -> list[Tensor]:
    """The tensors that are not None."""
    return [x for x in tensors if x is not None]
