"""The depth entries of a forward pass in one tensor, and the sums of their gradients in another one.

Each attention over depth reads a range of the entries, so its cost on the host does not depend on their number. In the
backward pass it adds its gradients of the entries to one tensor of sums; autograd itself would make a gradient for
every entry of every layer, and add them up one by one.

    k, v -> Append 0 -> token -> Append 1 -> token -> Append 2 -> ...
                          |                    `-> an attention that reads the entries 0 and 1
                          `-> an attention that reads the entry 0

A token is an empty tensor. Because of the tokens, autograd runs the backward pass of an Append after those of all
attentions that read its entry.

Shapes: n entries, 2 a key and a value, b batch, k key/value heads, t tokens, e head size.
"""

from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from depthlm.ops.autograd import NO_PASS, current_pass

Pair = tuple[Tensor, Tensor]


class GradientSums:
    """The gradients of all entries of a bank, each summed over the attentions that read it, during a backward pass."""

    def __init__(self) -> None:
        self.task = NO_PASS
        self.sums_n2btke: Tensor | None = None
        self.written: set[int] = set()

    def reserve(self, entries_n2btke: Tensor, start: int, end: int) -> tuple[Tensor, int]:
        """Return the sums of the entries from start to end, to which the caller must add its gradients, and `fresh`.

        The first `fresh` of these sums are undefined: the caller must replace them.
        """
        task = current_pass()
        if self.sums_n2btke is None or task != self.task:
            # a second backward pass through the same graph begins with new sums
            self.task = task
            self.sums_n2btke = torch.empty_like(entries_n2btke)
            self.written = set()
        new = [j for j in range(start, end) if j not in self.written]
        self.written.update(new)
        if new and new[-1] - start >= len(new):
            # some entries have sums and lie before others that have none
            for j in new:
                self.sums_n2btke[j].zero_()
            new = []
        return self.sums_n2btke[start:end], len(new)

    def take(self, index: int, last: bool) -> Pair | None:
        """Return the sums k_bkte and v_bkte of an entry, or None if nothing has read it. last: whether to free all."""
        newest = None
        if self.task == current_pass() and index in self.written:
            assert self.sums_n2btke is not None
            key, value = self.sums_n2btke[index].transpose(2, 3).unbind()
            newest = key, value
        if last:
            self.sums_n2btke = None
            self.written = set()
        return newest


class Bank:
    """The memory of all entries of a forward pass. The first entry determines its shape and dtype."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.entries_n2btke: Tensor | None = None
        self.sums = GradientSums()

    def write(self, index: int, k_bkte: Tensor, v_bkte: Tensor) -> Pair:
        """Copy an entry to its place, and return it as k_bkte and v_bkte in the bank."""
        if self.entries_n2btke is None:
            b, k, t, e = k_bkte.shape
            self.entries_n2btke = k_bkte.new_empty(self.capacity, 2, b, t, k, e)
        # .data has its own version counter: for autograd, the entries that other attentions saved do not change
        key, value = self.entries_n2btke[index].data.transpose(2, 3).unbind()
        torch._foreach_copy_([key, value], [k_bkte, v_bkte])
        return key, value


class Append(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bank: Bank, index: int, k_bkte: Tensor, v_bkte: Tensor, token: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.index = bank.sums, index
        # the first entry is the last one in the backward pass
        ctx.last = token is None or not token.requires_grad
        return *bank.write(index, k_bkte, v_bkte), k_bkte.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        sums = ctx.sums.take(ctx.index, ctx.last)
        # gradients of the copies, which the attention of this layer uses
        pairs = [(total, grad) for total, grad in zip(sums or (), grads, strict=False) if grad is not None]
        if pairs:
            torch._foreach_add_([total for total, _ in pairs], [grad for _, grad in pairs])
        return None, None, *(sums or grads[:2]), None


class Depth(Sequence[Pair]):
    """The newest entries of a bank, as a sequence of pairs (k_bkte, v_bkte). `append` returns a new sequence.

    end: the number of entries that were appended so far, including those that are not in the sequence.
    token: an input of every attention over these entries; None without gradients.
    """

    def __init__(self, bank: Bank, pairs: tuple[Pair, ...] = (), end: int = 0, token: Tensor | None = None):
        self.bank = bank
        self.pairs = pairs
        self.end = end
        self.token = token

    @property
    def start(self) -> int:
        """The place of the first of these entries in the bank."""
        return self.end - len(self.pairs)

    @property
    def entries_n2btke(self) -> Tensor:
        """These entries, without gradients."""
        assert self.bank.entries_n2btke is not None
        return self.bank.entries_n2btke[self.start : self.end]

    def append(self, k_bkte: Tensor, v_bkte: Tensor, slots: int | None = None) -> "Depth":
        """Return the newest `slots` entries, or all, including this new one.

        The new pair is a copy in the bank. A caller that uses it in place of its tensors saves their memory.
        """
        if torch.is_grad_enabled():
            key, value, token = Append.apply(self.bank, self.end, k_bkte, v_bkte, self.token)
        else:
            (key, value), token = self.bank.write(self.end, k_bkte, v_bkte), self.token
        pairs = (*self.pairs, (key, value))
        return Depth(self.bank, pairs if slots is None else pairs[-slots:], self.end + 1, token)

    def repeat(self, times: int) -> "Depth":
        """Return copies of these entries for a batch that is repeated, in a bank of their own, without gradients."""
        bank = Bank(self.bank.capacity)
        copies = [(k_bkte.repeat(times, 1, 1, 1), v_bkte.repeat(times, 1, 1, 1)) for k_bkte, v_bkte in self.pairs]
        return Depth(bank, tuple(bank.write(index, *pair) for index, pair in enumerate(copies, self.start)), self.end)

    def __len__(self) -> int:
        return len(self.pairs)

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Pair, ...]: ...
    def __getitem__(self, index: int | slice) -> Pair | tuple[Pair, ...]:
        return self.pairs[index]

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.pairs)


def depth_of(pairs: Sequence[Pair]) -> Depth:
    """Return a new bank with copies of these pairs (k_bkte, v_bkte), through which their gradients flow."""
    depth = Depth(Bank(len(pairs)))
    for k_bkte, v_bkte in pairs:
        depth = depth.append(k_bkte, v_bkte)
    return depth
