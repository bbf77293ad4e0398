"""Gradients of a source of reads over depth, summed inside the kernels of the reads.

Many reads load the same source. Autograd would make a gradient of the source for each of them, and add them up one by
one, which moves twice as many bytes. So the kernels add their gradients to one sum:

    x -> Source -> token -> read 0
                     `----> read 1

A token is an empty tensor. Because of it, autograd runs the backward pass of a Source, which returns the sum as the
gradient of x, after those of all reads of x. The reads themselves return no gradient for x.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthlm.ops.autograd import NO_PASS, attached, current_pass, last_input_nodes


class Source(torch.autograd.Function):
    """The sum of the gradients of x over all reads, in a backward pass that is identified by `task`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.task, ctx.total = NO_PASS, None
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad_token: Tensor | None) -> Tensor | None:
        total, ctx.total = ctx.total, None
        return total if ctx.task == current_pass() else None


def tokens_of(sources: Sequence[Tensor]) -> list[Tensor]:
    """Return a token of each source, or an empty list if autograd itself must sum the gradients of the sources."""
    # two rows of a tile would add to the one sum of a source that occurs twice, in no order
    repeated = len({id(x) for x in sources}) < len(sources)
    if repeated or not torch.is_grad_enabled() or any(x.grad_fn is None for x in sources):
        return []
    # all reads of x must find the same token
    return [attached(x, "source_token", Source.apply) for x in sources]


def reserve_sums(ctx: Any, num_tokens: int, sources: Sequence[Tensor]) -> tuple[list[Tensor], list[bool]]:
    """Return where a kernel must write the gradients of the sources, and to which of them it must add.

    ctx: of a read whose last inputs are the tokens.
    """
    if not num_tokens:
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in sources], [False] * len(sources)
    task, sums, added = current_pass(), [], []
    for node, x in zip(last_input_nodes(ctx, num_tokens), sources, strict=True):
        added.append(node.task == task and node.total is not None)
        if not added[-1]:
            node.task, node.total = task, torch.empty_like(x, memory_format=torch.contiguous_format)
        sums.append(node.total)
    return sums, added


def returned(num_tokens: int, grads: list[Tensor]) -> tuple[list[Tensor] | list[None], list[None]]:
    """Return what the backward pass of a read returns for its sources and its tokens."""
    return [None] * len(grads) if num_tokens else grads, [None] * num_tokens
