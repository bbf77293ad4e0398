"""Streams that are computed again in the backward pass instead of kept in memory.

A write changes all n streams, so keeping them takes n hidden states per sublayer. X' = H_res X + H_post^T y follows
from X, y and the maps, which the write saves in any case. So of RUN consecutive writes, only the last keeps its X'. The
first node of the backward pass that needs another one computes all of its run. Each write frees its X' in its own
backward pass, which is the last that needs it.

A node is the context of an autograd function (`depthlm.ops.autograd.node_of`). A function that writes calls
`mark_write`, one that reads streams calls `save_streams` and `saved_streams`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from depthlm.ops.autograd import node_of

# writes per run: of the 96 X' of 48 layers, 12 are then kept, and up to 7 others are computed at a time
RUN = 8


def mark_write(ctx: Any, x: Tensor, rebuild: bool, compute: Callable[[Any], Tensor]) -> None:
    """Mark the node of a write to the streams x.

    rebuild: whether X' may be computed again. compute: returns X' of the node.
    """
    ctx.number = getattr(node_of(x), "number", 0) + 1
    ctx.rebuilds, ctx.compute, ctx.streams = rebuild and ctx.number % RUN != 0, compute, None


def save_streams(ctx: Any, x: Tensor, *others: Tensor | None) -> None:
    """Save the other tensors for the backward pass, and also x unless it can be computed again."""
    owner = node_of(x)
    ctx.source, ctx.shape = (owner, x.shape) if getattr(owner, "rebuilds", False) else (None, None)
    ctx.save_for_backward(*others, *(() if ctx.source is not None else (x,)))


def saved_streams(ctx: Any) -> tuple[Tensor, ...]:
    """Return the tensors that `save_streams` saved: x, then the others."""
    if ctx.source is None:
        *others, x = ctx.saved_tensors
        return x, *others
    return written(ctx.source).view(ctx.shape), *ctx.saved_tensors


def written(node: Any) -> Tensor:
    """Return X' of the node of a write that rebuilds it."""
    if node.streams is None:
        node.streams = node.compute(node)
    return node.streams
