"""Several documents in one sequence: positions that begin anew, and a mask.

Shapes: b batch, t new tokens, s tokens in the cache and new.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """positions_bt: of the new tokens in their documents. mask_b1ts: true where a token sees another, itself included.

    next_b1: the index in the sequence at which the document of the token to come begins.
    """

    positions_bt: Tensor
    mask_b1ts: Tensor
    next_b1: Tensor


def find_documents(ends_bt: Tensor, start: int = 0, first_b1: Tensor | None = None) -> Documents:
    """The documents of new tokens after `start` held ones.

    ends_bt: whether a token is the last of its document. first_b1: `next_b1` of the held tokens; None: all of them are
    of one document, still open.
    """
    index_s = torch.arange(start + ends_bt.shape[1], device=ends_bt.device)
    index_t = index_s[start:]
    after_bt = torch.where(ends_bt, index_t + 1, 0)
    first_b1 = torch.zeros_like(after_bt[:, :1]) if first_b1 is None else first_b1
    begin = torch.cat((first_b1, after_bt), dim=1).cummax(dim=1).values
    begin_bt = begin[:, :-1]
    # what lies between the beginning of a document and a token of it is of that document
    mask_bts = (begin_bt[..., None] <= index_s) & (index_s <= index_t[:, None])
    return Documents(index_t - begin_bt, mask_bts[:, None], begin[:, -1:])
