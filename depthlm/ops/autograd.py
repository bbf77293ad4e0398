"""Private or little-known behavior of PyTorch that the operators rely on, all in one place.

Each function says why it is safe, and where it is private, which part of PyTorch relies on it too.
`tests/ops/test_autograd.py` fails if one of them stops working.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NO_PASS = -1


def current_pass() -> int:
    """Return a number that identifies the running backward pass, NO_PASS outside of one.

    A second backward pass through the same graph has another number, so sums from the first pass are not reused. The
    function is private, but torch.utils.checkpoint and torch.autograd.graph.register_multi_grad_hook use it, and the
    numbers only need to differ between passes.
    """
    return torch._C._current_graph_task_id()


def node_of(x: Tensor) -> Any:
    """Return the autograd node that computed x (for a view, that of its base); None for a leaf.

    The node of an autograd function is its context, so attributes that a forward pass sets on `ctx` are found again on
    `grad_fn` of its outputs (torch.autograd.function.BackwardCFunction is a subclass of FunctionCtx). A node lives as
    long as its outputs or the nodes that follow it. `_base` is private, but fake tensors
    (torch._subclasses.meta_utils) read it in the same way.
    """
    return (x if x._base is None else x._base).grad_fn


def last_input_nodes(ctx: Any, count: int) -> list[Any]:
    """Return the nodes of the last `count` inputs of an autograd function, in its backward pass.

    `next_functions` of a node, documented in torch.autograd.graph.Node, has one entry per input, in order. Saved
    tensors would not do: under activation checkpointing they belong to the recomputation, which is another graph.
    """
    return [node for node, _ in ctx.next_functions[-count:]]


def attached(x: Tensor, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor that is attached to x under this name, and make it at the first call.

    It lives as long as the Python object of x, which PyTorch keeps while the tensor lives (c10/core/impl/PyObjectSlot),
    and which all users of the same tensor share. A view, a copy or a detached x has no attributes.
    """
    if not hasattr(x, name):
        setattr(x, name, make(x))
    return getattr(x, name)
