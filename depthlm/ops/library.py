"""Registers operators. For torch.compile, fake tensors and dispatch modes, a call is one operator, whatever it does.

`torch.library.custom_op` does the same, but its autograd kernel and its checks of every call take 27 us with a list of
tensors on two CPU cores, where this takes 5. An operator here is not differentiable: an autograd function, outside of
it, calls one operator forward and another one backward.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.library import Library

# the function of each operator by its qualified name, for a mode that runs it in place of the operator
FUNCTIONS: dict[str, Callable[..., Any]] = {}
# a registration ends with its library
_LIBRARIES: dict[str, Library] = {}


def register(
    name: str,
    fake: Callable[..., Any] = lambda *_: None,
    *,
    mutates: Sequence[str] = (),
    schema: str | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that registers a function as an operator, and returns the operator.

    The operator's name contains the package of the function, so that exported copies do not collide. fake: returns
    empty results of the right shape, dtype and strides; by default None, for one that only writes to its arguments.
    mutates: the arguments that the function writes. schema: replaces the one that the annotations of the function give.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        package = function.__module__.rpartition(".")[0] or function.__module__
        library, free = Library(re.sub(r"[^0-9A-Za-z_]", "_", package), "FRAGMENT"), name
        operators = getattr(torch.ops, library.ns)
        # what holds operators of a module that is imported again keeps them
        while hasattr(operators, free):
            free += "_again"
        signature = schema or torch.library.infer_schema(function, mutates_args=mutates)
        library.define(free + signature, tags=torch.Tag.pt2_compliant_tag)
        library.impl(free, function, "CompositeExplicitAutograd")
        qualified = f"{library.ns}::{free}"
        torch.library.register_fake(qualified, fake, lib=library)
        FUNCTIONS[qualified], _LIBRARIES[qualified] = function, library
        return getattr(operators, free).default

    return decorate


def make_differentiable(operator: Any, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
    """Make an operator differentiable, which is needed where compiled code calls it. A call then takes longer.

    Arguments as those of `torch.library.register_autograd`.
    """
    name = operator._schema.name
    torch.library.register_autograd(name, backward, setup_context=setup_context, lib=_LIBRARIES[name])
