"""The key/value cache of generation: a standard decoder's, one slot per attention.

Shapes: b batch, k key/value heads, t new tokens, s all tokens so far, e head size.
"""

from typing import Protocol

import torch
from torch import Tensor


class Cache(Protocol):
    """What a decoder asks of a cache: that of `KVCache`, or another that holds the same."""

    length: int
    document_b1: Tensor | None

    def update(self, slot: int, k_bkte: Tensor, v_bkte: Tensor) -> tuple[Tensor, Tensor]: ...

    def advance(self, tokens: int, document_b1: Tensor | None = None) -> None: ...


class KVCache:
    """Keys and values of all tokens so far, in `slots` slots (layers, or loops x layers).

    `length` is the number of tokens held, so the position of the next one. It moves once per forward pass, by
    `advance`, after every slot has been updated; `document_b1` is the position at which the document of the next token
    begins, None where documents are not told apart. Room for `max_length` tokens is made at once and doubled when full.
    """

    def __init__(self, slots: int, max_length: int = 256):
        self.length = 0
        self.document_b1: Tensor | None = None
        self.max_length = max_length
        self._held: list[tuple[Tensor, Tensor] | None] = [None] * slots

    def update(self, slot: int, k_bkte: Tensor, v_bkte: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the new tokens to a slot; returns all of its keys and values, k_bkse and v_bkse."""
        end = self.length + k_bkte.shape[2]
        held = self._held[slot]
        if held is None or end > held[0].shape[2]:
            held = self._grow(held, end, k_bkte, v_bkte)
            self._held[slot] = held
        for store, new in zip(held, (k_bkte, v_bkte), strict=True):
            store[:, :, self.length : end] = new
        return held[0][:, :, :end], held[1][:, :, :end]

    def advance(self, tokens: int, document_b1: Tensor | None = None) -> None:
        """Counts the tokens that every slot has just been given."""
        self.length += tokens
        self.document_b1 = document_b1

    def bytes(self) -> int:
        """Memory of the tokens held, in bytes."""
        pairs = [pair for pair in self._held if pair is not None]
        return sum(t[:, :, : self.length].numel() * t.element_size() for pair in pairs for t in pair)

    def _grow(self, held: tuple[Tensor, Tensor] | None, end: int, *new: Tensor) -> tuple[Tensor, Tensor]:
        while self.max_length < end:
            self.max_length *= 2
        stores = []
        for i, tensor in enumerate(new):
            batch, heads, _, width = tensor.shape
            store = tensor.new_zeros(batch, heads, self.max_length, width)
            if held is not None:
                store[:, :, : self.length] = held[i][:, :, : self.length]
            stores.append(store)
        return stores[0], stores[1]


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """mask_ts, true where query i, the last `queries` of `keys` tokens, may see key j."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
