"""Validation batches: a set once, in consecutive windows or with one document per row."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from depthlm.data.sampler import IGNORED
from depthlm.data.token_files import TokenFiles
from depthlm.errors import DataError

# tokens that are searched for the ends of documents at once, and the smallest width of a row of a document
BLOCK, NARROWEST = 2**20, 32


class DocumentRows(NamedTuple):
    """One document per row. end_of_text: the token that ends a document. longest: the most tokens of a row."""

    end_of_text: int
    longest: int


def validation_batches(
    tokens: TokenFiles,
    sequence_length: int,
    micro_batch: int,
    max_tokens: int | None = None,
    *,
    documents: DocumentRows | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (inputs [b, T], targets [b, T]) over the first max_tokens tokens; each but the first is a target once.

    Without `documents`, rows are windows in the order of the tokens, with T = sequence_length and b <= micro_batch.
    With them, a row is a document, predicted from the end-of-text token before it; one longer than `longest` has
    several rows. Rows of similar length come together, T <= longest, and b T is at most micro_batch * sequence_length,
    or b is 1. Rows are padded with inputs 0 and targets IGNORED.

    Each of several ranks takes every ranks-th row. All ranks get the same number of batches, since with ZeRO 3 they
    must run the model together: a rank that would have one batch fewer gets a last batch without targets.

    Raises DataError where there are fewer than two tokens.
    """
    total = min(len(tokens), max_tokens or len(tokens))
    if total < 2:
        remedy = "Give more text, or raise training.validation_tokens."
        raise DataError(f"{total} validation tokens leave nothing to predict", tokens.folder, remedy)
    if documents is None:
        begins = np.arange(0, total - 1, sequence_length)
        ends, widths = np.minimum(begins + sequence_length, total - 1), np.full_like(begins, sequence_length)
    else:
        begins, ends = _documents(tokens, total, documents)
        powers = np.ceil(np.log2(np.maximum(ends - begins, NARROWEST))).astype(int)
        # rows of similar length come together, in few shapes
        widths = np.minimum(2**powers, documents.longest)
    for width in np.unique(widths).tolist():
        rows = np.stack((begins, ends), axis=1)[widths == width]
        size = max(1, micro_batch * sequence_length // width)
        for first in range(0, -(-len(rows) // ranks), size):
            # a row that begins at the end has no targets
            spans = rows[rank::ranks][first : first + size].tolist() or [(total, total)]
            samples = torch.from_numpy(np.stack([_row(tokens, begin, end, width) for begin, end in spans]))
            yield samples[:, :-1].clamp(min=0), samples[:, 1:].contiguous()


def _documents(tokens: TokenFiles, total: int, documents: DocumentRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first input and the last target of each row."""
    blocks = ((start, tokens.read(start, min(BLOCK, total - start))) for start in range(0, total, BLOCK))
    found = [start + np.flatnonzero(block == documents.end_of_text) for start, block in blocks]
    bounds = np.unique(np.concatenate([[0], *found, [total - 1]]))
    rows = [
        (begin, min(begin + documents.longest, end))
        for first, end in itertools.pairwise(bounds.tolist())
        for begin in range(first, end, documents.longest)
    ]
    begins, ends = zip(*rows, strict=True)
    return np.array(begins), np.array(ends)


def _row(tokens: TokenFiles, begin: int, end: int, width: int) -> NDArray[np.int64]:
    """Return tokens begin to end, both included, padded to width + 1."""
    row = np.full(width + 1, IGNORED, dtype=np.int64)
    if begin < end:
        row[: end - begin + 1] = tokens.read(begin, end - begin + 1)
    return row
