"""Several documents in one sequence: the positions within each document, and what they attend to.

Shapes: b batch, t new tokens, s cached and new tokens.
"""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from depthlm.ops.flash import Bounds


class DocumentMask:
    """Which tokens the new tokens attend to: as a mask, or as the bounds of documents. Each is computed when needed."""

    def __init__(self, begin_bt: Tensor, start: int):
        """begin_bt: the sequence index at which the document of each new token begins. start: cached tokens."""
        self.begin_bt, self.start = begin_bt, start

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
        """The bounds of the documents, without cached tokens. The host waits for the GPU to know their number."""
        b, t = self.begin_bt.shape
        begins = self.starts_bt
        # meta tensors have no values, and the number of documents hardly affects the memory that is counted with them
        first = begins[:, 0] if self.begin_bt.is_meta else begins.flatten().nonzero()[:, 0]
        return Bounds(torch.cat((first.int(), first.new_full((1,), b * t, dtype=torch.int32))), t)


class Documents(NamedTuple):
    """The positions of new tokens within their documents, and which tokens they attend to.

    next_b1: the sequence index at which the document of the next token begins.
    """

    positions_bt: Tensor
    mask: DocumentMask
    next_b1: Tensor


def find_documents(ends_bt: Tensor, start: int = 0, first_b1: Tensor | None = None) -> Documents:
    """Return the documents of new tokens that follow `start` cached tokens.

    ends_bt: true where a token is the last of its document.
    first_b1: `next_b1` of the cached tokens; None: all of them belong to one document that has not ended.
    """
    index_t = torch.arange(start, start + ends_bt.shape[1], device=ends_bt.device)
    after_bt = torch.where(ends_bt, index_t + 1, 0)
    first_b1 = torch.zeros_like(after_bt[:, :1]) if first_b1 is None else first_b1
    begin = torch.cat((first_b1, after_bt), dim=1).cummax(dim=1).values
    begin_bt = begin[:, :-1]
    return Documents(index_t - begin_bt, DocumentMask(begin_bt, start), begin[:, -1:])
