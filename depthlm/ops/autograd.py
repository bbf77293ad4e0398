"""Helpers of operators with hand-written backward passes.

Some rely on private or little-known behavior of PyTorch. Each of these says why it is safe, and which part of PyTorch
relies on it too. The tests of the operators fail if one of them stops working.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

NO_PASS = -1
# values of a source per chunk: the chunks of 8 to 16 sources and reads fit into a CPU's cache
CHUNK = 2**16
GPU_CHUNK = 2**24


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


def attach(x: Tensor, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor that is attached to x under this name, and make it at the first call.

    It lives as long as the Python object of x, which PyTorch keeps while the tensor lives (c10/core/impl/PyObjectSlot),
    and which all users of the same tensor share. A view, a copy or a detached x has no attributes.
    """
    if not hasattr(x, name):
        setattr(x, name, make(x))
    return getattr(x, name)


class NoContext:
    """A context for a forward pass without a backward pass. It saves nothing."""

    def save_for_backward(self, *tensors: Any) -> None:
        """Do nothing."""

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing."""


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


def stack_sources(sources_pd: Sequence[Tensor], part: slice, dtype: torch.dtype, dim: int = 0) -> Tensor:
    """Return a chunk of all sources in one dtype."""
    return torch.stack([x_pd[part].to(dtype) for x_pd in sources_pd], dim)


def present(*tensors: Tensor | None) -> list[Tensor]:
    """Return the tensors that are not None."""
    return [x for x in tensors if x is not None]
