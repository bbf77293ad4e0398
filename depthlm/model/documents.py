"""Several documents in one sequence: the positions within each document, and the attention mask.

Shapes: b batch, t new tokens, s cached and new tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """The positions and the attention mask of new tokens.

    positions_bt: positions of the new tokens within their documents.
    mask_b1ts: true where a new token may attend to a token, itself included.
    next_b1: the sequence index at which the document of the next token begins.
    """

    positions_bt: Tensor
    mask_b1ts: Tensor
    next_b1: Tensor


def find_documents(ends_bt: Tensor, start: int = 0, first_b1: Tensor | None = None) -> Documents:
    """Return the documents of new tokens that follow `start` cached tokens.

    ends_bt: true where a token is the last of its document.
    first_b1: `next_b1` of the cached tokens; None: all of them belong to one document that has not ended.
    """
    index_s = torch.arange(start + ends_bt.shape[1], device=ends_bt.device)
    index_t = index_s[start:]
    after_bt = torch.where(ends_bt, index_t + 1, 0)
    first_b1 = torch.zeros_like(after_bt[:, :1]) if first_b1 is None else first_b1
    begin = torch.cat((first_b1, after_bt), dim=1).cummax(dim=1).values
    begin_bt = begin[:, :-1]
    # all tokens from the beginning of a document to the query belong to that document
    mask_bts = (begin_bt[..., None] <= index_s) & (index_s <= index_t[:, None])
    return Documents(index_t - begin_bt, mask_bts[:, None], begin[:, -1:])
