"""The cache of generation, with one slot per layer: keys and values as in a standard decoder, or a state.

Shapes: b batch, k key/value heads, t new tokens, s all tokens so far, e head size.
"""

from typing import Protocol

import torch
from torch import Tensor


class Cache(Protocol):
    """The interface of a cache, for `KVCache` and other implementations."""

    length: int
    document_b1: Tensor | None

    def update(self, slot: int, k_bkte: Tensor, v_bkte: Tensor) -> tuple[Tensor, Tensor]: ...

    def state(self, slot: int) -> tuple[Tensor, ...] | None: ...

    def set_state(self, slot: int, state: tuple[Tensor, ...]) -> None: ...

    def advance(self, tokens: int, document_b1: Tensor | None = None) -> None: ...


class KVCache:
    """Keys and values of all tokens so far, or a state that holds all of them, in `slots` slots (loops x layers).

    `length` is the number of cached tokens, and so the index of the next one. `advance` increases it once per forward
    pass, after every slot has been updated. `document_b1` is the sequence index at which the document of the next token
    begins, or None if each sequence is one document. `max_length` is the initial capacity in tokens; it doubles when
    full.
    """

    def __init__(self, slots: int, max_length: int = 256):
        self.length = 0
        self.document_b1: Tensor | None = None
        self.max_length = max_length
        self._slots: list[tuple[Tensor, Tensor] | None] = [None] * slots
        self._states: dict[int, tuple[Tensor, ...]] = {}

    def update(self, slot: int, k_bkte: Tensor, v_bkte: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens to a slot; return all of its keys and values, k_bkse and v_bkse."""
        end = self.length + k_bkte.shape[2]
        pair = self._slots[slot]
        if pair is None or end > pair[0].shape[2]:
            pair = self._grow(pair, end, k_bkte, v_bkte)
            self._slots[slot] = pair
        for store, new in zip(pair, (k_bkte, v_bkte), strict=True):
            store[:, :, self.length : end] = new
        return pair[0][:, :, :end], pair[1][:, :, :end]

    def state(self, slot: int) -> tuple[Tensor, ...] | None:
        """Return the state of a slot after the last cached token; None before the first one."""
        return self._states.get(slot)

    def set_state(self, slot: int, state: tuple[Tensor, ...]) -> None:
        """Keep the state of a slot after the new tokens."""
        self._states[slot] = state

    def advance(self, tokens: int, document_b1: Tensor | None = None) -> None:
        """Count tokens that were appended to every slot."""
        self.length += tokens
        self.document_b1 = document_b1

    def bytes(self) -> int:
        """Return the memory of the cached tokens, in bytes."""
        pairs = [pair for pair in self._slots if pair is not None]
        kept = [t[:, :, : self.length] for pair in pairs for t in pair]
        kept += [t for state in self._states.values() for t in state]
        return sum(t.numel() * t.element_size() for t in kept)

    def _grow(self, pair: tuple[Tensor, Tensor] | None, end: int, *new: Tensor) -> tuple[Tensor, Tensor]:
        while self.max_length < end:
            self.max_length *= 2
        stores = []
        for i, tensor in enumerate(new):
            batch, heads, _, width = tensor.shape
            store = tensor.new_zeros(batch, heads, self.max_length, width)
            if pair is not None:
                store[:, :, : self.length] = pair[i][:, :, : self.length]
            stores.append(store)
        return stores[0], stores[1]


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return mask_ts, true where a query may attend to a key. The queries are the last ones of the keys' tokens."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
