"""What new tokens attend to besides one another: the cache of generation, within the documents of a sequence.

Shapes: b batch, k key/value heads, t new tokens, s cached and new tokens, e head size.
"""

from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from depthlm.ops.dropout import Dropout
from depthlm.ops.flash import Bounds, takes_documents


class DocumentMask:
    """Which tokens the new tokens attend to: as a mask, or as the bounds of documents. Each is computed when needed."""

    def __init__(self, begin_bt: Tensor, start: int, max_documents: int | None = None):
        """begin_bt: the sequence index at which the document of each new token begins. start: cached tokens.

        max_documents: all sequences together have at most this many; None: unknown.
        """
        self.begin_bt = begin_bt
        self.start = start
        self.max_documents = max_documents

    @cached_property
    def mask_b1ts(self) -> Tensor:
        """True where a new token may attend to a token, itself included."""
        index_s = torch.arange(self.start + self.begin_bt.shape[1], device=self.begin_bt.device)
        index_t = index_s[self.start :]
        # all tokens from the beginning of a document to the query belong to that document
        mask_bts = (self.begin_bt[..., None] <= index_s) & (index_s <= index_t[:, None])
        return mask_bts[:, None]

    @cached_property
    def starts_bt(self) -> Tensor:
        """True where a document begins."""
        index_t = torch.arange(self.begin_bt.shape[1], device=self.begin_bt.device)
        return self.begin_bt == index_t + self.start

    @cached_property
    def bounds(self) -> Bounds:
        """The bounds of the documents, without cached tokens.

        With max_documents, empty ones follow the last. Without, the host waits for the GPU to know their number.
        """
        b, t = self.begin_bt.shape
        starts_bt = self.starts_bt
        if self.max_documents is not None:
            number = torch.arange(1, self.max_documents + 2, device=starts_bt.device)
            return Bounds(torch.searchsorted(starts_bt.flatten().cumsum(0), number, out_int32=True), t)
        # meta tensors have no values, and the number of documents hardly affects the memory that is counted with them
        first = starts_bt[:, 0] if self.begin_bt.is_meta else starts_bt.flatten().nonzero()[:, 0]
        return Bounds(torch.cat((first.int(), first.new_full((1,), b * t, dtype=torch.int32))), t)


class Documents(NamedTuple):
    """The positions of new tokens within their documents, and which tokens they attend to.

    next_b1: the sequence index at which the document of the next token begins.
    """

    positions_bt: Tensor
    mask: DocumentMask
    next_b1: Tensor


def find_documents(
    ends_bt: Tensor, start: int = 0, first_b1: Tensor | None = None, max_documents: int | None = None
) -> Documents:
    """Return the documents of new tokens that follow `start` cached tokens. max_documents: see `DocumentMask`.

    ends_bt: true where a token is the last of its document.
    first_b1: `next_b1` of the cached tokens; None: all of them belong to one document that has not ended.
    """
    index_t = torch.arange(start, start + ends_bt.shape[1], device=ends_bt.device)
    after_bt = torch.where(ends_bt, index_t + 1, 0)
    first_b1 = torch.zeros_like(after_bt[:, :1]) if first_b1 is None else first_b1
    begin = torch.cat((first_b1, after_bt), dim=1).cummax(dim=1).values
    begin_bt = begin[:, :-1]
    return Documents(index_t - begin_bt, DocumentMask(begin_bt, start, max_documents), begin[:, -1:])


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
        kept = sum(t[:, :, : self.length].nbytes for pair in pairs for t in pair)
        return kept + sum(t.untyped_storage().nbytes() for state in self._states.values() for t in state)

    def _grow(self, pair: tuple[Tensor, Tensor] | None, end: int, *new: Tensor) -> tuple[Tensor, Tensor]:
        while self.max_length < end:
            self.max_length = max(1, 2 * self.max_length)
        stores = [x.new_zeros(*x.shape[:2], self.max_length, x.shape[3]) for x in new]
        for store, old in zip(stores, pair or (), strict=False):
            store[:, :, : self.length] = old[:, :, : self.length]
        return stores[0], stores[1]


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return mask_ts, true where a query may attend to a key. The queries are the last ones of the keys' tokens."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class AttentionContext(NamedTuple):
    """Which tokens of the sequence the new tokens attend to, the slot of the cache for this layer, and its dropout.

    documents: limits attention to one document; None: each token attends to itself and to all tokens before it.
    dropout: of this layer in training, also of what follows the attention; None: no dropout.
    """

    documents: DocumentMask | None = None
    cache: Cache | None = None
    slot: int = 0
    dropout: Dropout | None = None

    @property
    def mask_b1ts(self) -> Tensor | None:
        """True where a query may attend to a key, within one document; None without documents."""
        return None if self.documents is None else self.documents.mask_b1ts

    def bounds(self, q_bhte: Tensor) -> Bounds | None:
        """Return the bounds of the documents, with which flash attention needs no mask; None if it cannot be used."""
        if self.documents is None or self.cache is not None or self.dropout or not takes_documents(q_bhte):
            return None
        return self.documents.bounds

    def extend(self, k_bkte: Tensor, v_bkte: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new keys and values to the cache; return the cached and the new ones, k_bkse and v_bkse."""
        return (k_bkte, v_bkte) if self.cache is None else self.cache.update(self.slot, k_bkte, v_bkte)

    def state(self) -> tuple[Tensor, ...] | None:
        """Return the tensors that were kept after the last cached token; None before the first one."""
        return None if self.cache is None else self.cache.state(self.slot)

    def set_state(self, state: tuple[Tensor, ...]) -> None:
        """Keep tensors that hold all tokens so far, in place of keys and values."""
        if self.cache is not None:
            self.cache.set_state(self.slot, state)
