"""Validation batches: windows of a set, and one document per row."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthlm.data import IGNORED, DataError, DocumentRows, TokenFiles, validation_batches
from depthlm.data.preparation.progress import SplitWriter

END = 1


def written(folder: Path, tokens: np.ndarray, shard_tokens: int = 100) -> TokenFiles:
    writer = SplitWriter(folder, "train", "uint16", 200, shard_tokens)
    writer.add(tokens, 1, 1)
    return TokenFiles(folder, writer.finish().files, "uint16")


@pytest.mark.parametrize(
    ("count", "length", "max_tokens"),
    [(101, 10, None), (95, 10, 10**6), (11, 10, 2), (50, 1, 37)],
)
def test_validation_covers_the_split_once_for_any_batch_size(tmp_path, count, length, max_tokens):
    tokens = written(tmp_path, np.arange(count))

    def rows(micro_batch: int, **share: int) -> tuple[torch.Tensor, torch.Tensor]:
        batches = list(validation_batches(tokens, length, micro_batch, max_tokens, **share))
        assert all(len(inputs) <= micro_batch for inputs, _ in batches)
        inputs, targets = (torch.cat(part) for part in zip(*batches, strict=True))
        return inputs, targets

    inputs, targets = rows(1)
    scored = targets != IGNORED
    assert targets[scored].tolist() == list(range(1, min(count, max_tokens or count)))
    assert torch.equal(inputs[scored] + 1, targets[scored])
    assert inputs.min() >= 0
    assert scored.any(dim=1).all()
    for micro_batch in (2, 3, 64):
        assert all(torch.equal(a, b) for a, b in zip(rows(micro_batch), (inputs, targets), strict=True))
    if len(inputs) >= 2:
        shared = torch.cat([rows(2, rank=rank, ranks=2)[1] for rank in range(2)])
        assert sorted(shared[shared != IGNORED].tolist()) == sorted(targets[scored].tolist())
    counts = {len(list(validation_batches(tokens, length, 2, max_tokens, rank=rank, ranks=3))) for rank in range(3)}
    assert len(counts) == 1


def test_a_validation_set_of_one_token_is_an_error(tmp_path):
    with pytest.raises(DataError, match="nothing to predict"):
        next(validation_batches(written(tmp_path, np.arange(10)), 5, 1, 1))


@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=12),
    unfinished=st.integers(0, 5),
    longest=st.sampled_from([16, 50, 64]),
    micro_batch=st.integers(1, 9),
    ranks=st.integers(1, 3),
)
def test_a_row_is_a_document_after_the_end_of_the_one_before(
    tmp_path_factory, lengths, unfinished, longest, micro_batch, ranks
):
    text = [token for n in lengths for token in (*range(10, 10 + n), END)] + [9] * unfinished
    if len(text) < 2:
        text = [9, END]
    tokens = written(tmp_path_factory.mktemp("set"), np.array(text))
    expected = [[*map(ord, document), END] for document in "".join(map(chr, text)).split(chr(END))]
    # the last one is empty, or has no end
    expected[-1].pop()
    rows, counts = [], set()
    for rank in range(ranks):
        batches = list(
            validation_batches(tokens, 20, micro_batch, documents=DocumentRows(END, longest), rank=rank, ranks=ranks)
        )
        counts.add(len(batches))
        for inputs, targets in batches:
            b, width = inputs.shape
            assert width <= longest
            assert b == 1 or b * width <= micro_batch * 20
            for row_inputs, row_targets in zip(inputs.tolist(), targets.tolist(), strict=True):
                n = sum(target != IGNORED for target in row_targets)
                assert row_targets[n:] == [IGNORED] * (width - n)
                assert row_inputs[1:n] == row_targets[: max(n - 1, 0)]
                rows.append((row_inputs[0], row_targets[:n]))
    assert len(counts) == 1
    # the first token of the set is an input only
    pieces = [
        (END if begin == 0 else document[begin - 1], document[begin : begin + longest])
        for document in expected[1:]
        for begin in range(0, len(document), longest)
    ]
    first = expected[0]
    pieces += [(first[begin], first[begin + 1 : begin + 1 + longest]) for begin in range(0, len(first) - 1, longest)]
    assert sorted(row for row in rows if row[1]) == sorted(piece for piece in pieces if piece[1])
