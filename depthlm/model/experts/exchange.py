"""Experts that are spread over ranks: tokens travel to the ranks of their experts, and the outputs travel back.

Shapes: n pairs of a token and an expert on this rank, m pairs that are sent to the experts of this rank, e experts,
s ranks, l experts of a rank, d hidden size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Spread(NamedTuple):
    """The ranks over which the experts of a layer are spread. Rank 0 of them has the first experts, and so on.

    group: their process group; None if the weights are on meta, where nothing is sent. rank: this rank among them.
    """

    group: torch.distributed.ProcessGroup | None
    rank: int
    ranks: int

    def share_of(self, whole_eod: Tensor) -> Tensor:
        """Return the part of a stacked tensor of all experts that belongs to this rank."""
        return whole_eod.chunk(self.ranks)[self.rank]


def spread_of(weight: Tensor) -> Spread | None:
    """Return how a weight is spread over ranks; None if every rank has the whole weight."""
    return getattr(weight, "spread", None)


class Sort(torch.autograd.Function):
    """x_rd -> x_nd, its rows in another order, each `copies` times. PyTorch's own backward pass adds row by row."""

    @staticmethod
    def forward(ctx: Any, x_rd: Tensor, order_n: Tensor, inverse_n: Tensor, copies: int) -> Tensor:
        """order_n: which row to take, counting copies as rows. inverse_n: the inverse permutation."""
        ctx.save_for_backward(inverse_n)
        ctx.copies = copies
        return x_rd[order_n // copies if copies > 1 else order_n]

    @staticmethod
    def backward(ctx: Any, gradient_nd: Tensor) -> Any:
        (inverse_n,) = ctx.saved_tensors
        gradient_nd = gradient_nd[inverse_n]
        if ctx.copies > 1:
            gradient_nd = gradient_nd.unflatten(0, (-1, ctx.copies)).sum(1)
        return gradient_nd, None, None, None


class Send(torch.autograd.Function):
    """x_nd -> x_md: the first rows go to rank 0, and so on. The gradients travel back. Collective."""

    @staticmethod
    def forward(ctx: Any, x_nd: Tensor, spread: Spread, sent: list[int], received: list[int]) -> Tensor:
        """sent, received: the number of rows to and from each rank."""
        ctx.arguments = spread, received, sent
        return send(x_nd, spread, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient_md: Tensor) -> Any:
        return send(gradient_md, *ctx.arguments), None, None, None


def send(x_nd: Tensor, spread: Spread, sent: list[int], received: list[int]) -> Tensor:
    """Return the rows that all ranks have sent to this one, in the order of ranks; collective."""
    x_md = x_nd.new_empty(sum(received), *x_nd.shape[1:])
    if not x_nd.is_meta:
        torch.distributed.all_to_all_single(x_md, x_nd.contiguous(), received, sent, group=spread.group)
    return x_md


def exchange(compute: Callable[[Tensor, Tensor], Tensor], spread: Spread, x_nd: Tensor, ends_e: Tensor) -> Tensor:
    """Return y_nd, the outputs of the experts for rows that are sorted by expert; collective.

    compute: (x_md, ends_l) -> y_md, the experts of this rank. ends_e: where the rows of each of all experts end. A rank
    gets as many rows as are sent to it, perhaps none. The host waits for the numbers of rows.
    """
    counts_e = ends_e.diff(prepend=ends_e.new_zeros(1))
    counts_sl = torch.empty_like(counts_e)
    if x_nd.is_meta:
        # numbers of rows are values, which meta tensors do not have; equal loads are assumed, as without ranks
        share, rest = divmod(len(x_nd), spread.ranks)
        sent = received = [share + (rank < rest) for rank in range(spread.ranks)]
    else:
        torch.distributed.all_to_all_single(counts_sl, counts_e, group=spread.group)
        both = torch.stack((counts_e, counts_sl)).unflatten(1, (spread.ranks, -1)).sum(2)
        sent, received = both.tolist()
    x_md = Send.apply(x_nd, spread, sent, received)
    local = len(ends_e) // spread.ranks
    experts_sl = torch.arange(local, device=x_nd.device).repeat(spread.ranks)
    order_m = experts_sl.repeat_interleave(counts_sl, output_size=sum(received)).argsort(stable=True)
    inverse_m = order_m.argsort()
    ends_l = counts_sl.view(spread.ranks, local).sum(0).cumsum(0).int()
    y_md = compute(Sort.apply(x_md, order_m, inverse_m, 1), ends_l)
    return Send.apply(Sort.apply(y_md, inverse_m, order_m, 1), spread, received, sent)
