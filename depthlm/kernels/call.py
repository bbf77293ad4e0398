"""How an operator with a backward pass of its own is called, and what it is registered as."""

import re
from typing import Any

import torch


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
