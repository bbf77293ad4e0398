"""Delta attention by chunks equals its recurrence."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlm.ops.kimi_delta import chunked as module
from depthlm.ops.kimi_delta.chunked import CHUNK, chunked
from depthlm.ops.kimi_delta.naive import recurrence

from ..inputs import assert_close
from .inputs import NAMES, inputs, results, starts


@settings(max_examples=15)
@given(
    b=st.integers(1, 3), t=st.integers(1, 40), h=st.integers(1, 3), d=st.integers(1, 5), e=st.integers(1, 5),
    chunk=st.sampled_from([1, 8, 16, CHUNK]), strongest=st.sampled_from([0.0, 0.1, 2.0, 100.0]),
    share=st.sampled_from([None, 0.0, 0.05, 0.5]), seed=st.integers(0, 99),
)  # fmt: skip
def test_chunks_equal_the_recurrence(b, t, h, d, e, chunk, strongest, share, seed):
    arguments = inputs(b, t, h, d, e, strongest, seed)
    starts_bt = None if share is None else starts(b, t, share, seed)
    with patch.object(module, "CHUNK", chunk):
        found = results(chunked, arguments, starts_bt)
    assert_close(NAMES, found, results(recurrence, arguments, starts_bt), 1e-10)


@pytest.mark.parametrize(("t", "share"), [(CHUNK, None), (2 * CHUNK + 10, 0.02)])
def test_long_sequences_equal_the_recurrence(t, share):
    arguments, documents = inputs(2, t, 2, 5, 4), None if share is None else starts(2, t, share)
    assert_close(NAMES, results(chunked, arguments, documents), results(recurrence, arguments, documents), 1e-10)


def test_a_batch_in_parts_equals_the_recurrence(monkeypatch):
    monkeypatch.setattr(module, "PART", 2 * 9 * 2 * 4)
    arguments, documents = inputs(5, 9, 2, 4, 3), starts(5, 9, 0.2)
    assert_close(NAMES, results(chunked, arguments, documents), results(recurrence, arguments, documents), 1e-10)


@pytest.mark.parametrize("strongest", [0.1, 1000.0])
def test_fp32_is_exact_for_any_decay(strongest):
    exact = inputs(1, 2 * CHUNK + 2, 2, 16, 16, strongest)
    found = results(chunked, [x.detach().float().requires_grad_() for x in exact])
    assert_close(NAMES, found, results(recurrence, exact), 3e-6)


def test_bf16_under_autocast_computes_in_fp32():
    rounded = [x.detach().bfloat16() for x in inputs(2, CHUNK + 9, 2, 16, 16)]
    expected = results(chunked, [x.double().requires_grad_() for x in rounded])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(chunked, [x.requires_grad_() for x in rounded])
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * 6]
    # that of a rounded result
    assert_close(NAMES, found, expected, 2**-8)
    assert_close(["state"], [found[1]], [expected[1]], 1e-5)
