"""Packed documents beyond the table of `test_properties`: random ones, and under autocast."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthlm.model import Decoder

from .test_properties import END, alone, assert_same

OVER_THE_SEQUENCE = ["vanilla", "moda", "depth_attention"]
# a document of length 1; the first and the last token; several early ends; none
ENDS = [[4, 5, 10], [0, 15], [0, 1, 2, 8], []]


def packed(ends: list[list[int]] = ENDS, length: int = 16) -> Tensor:
    tokens_bt = torch.randint(END + 1, 320, (len(ends), length), generator=torch.Generator().manual_seed(0))
    for row, places in zip(tokens_bt, ends, strict=True):
        row[places] = END
    return tokens_bt


def masked(model: Decoder, how: Any = True) -> Decoder:
    other = copy.deepcopy(model)
    other.mask_documents(how, END)
    return other


@settings(max_examples=15)
@given(
    ends=st.lists(st.lists(st.integers(0, 11), unique=True, max_size=6), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 11), unique=True, max_size=5).map(sorted),
    preset=st.sampled_from(OVER_THE_SEQUENCE),
    how=st.sampled_from([True, "bos"]),
)
def test_random_documents_in_random_pieces_equal_single_ones(build, ends, cuts, preset, how):
    model, tokens = masked(build(f"model={preset}", "size.num_layers=2").double(), how), packed(ends, 12)
    cache = model.make_cache()
    with torch.no_grad():
        pieces = [model(piece, cache=cache) for piece in tokens.tensor_split(cuts, dim=1)]
        assert_same(torch.cat(pieces, dim=1), alone(model, tokens, how))
        assert_same(model(tokens), alone(model, tokens, how))


@pytest.mark.parametrize("preset", ["moda", "dca"])
def test_mask_applies_under_autocast(build, preset):
    model = masked(build(f"model={preset}"))
    with torch.autocast("cpu", torch.bfloat16):
        logits, expected = model(packed()).float(), alone(model, packed(), True).float()
        unmasked = masked(model, False)(packed()).float()
    assert (logits - expected).norm() < 0.03 * expected.norm()
    assert (unmasked - expected).norm() > 0.2 * expected.norm()
