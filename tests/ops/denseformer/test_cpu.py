"""Several weighted sums at once, in one phase and in two, equal the definition, and so do all gradients."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlm.ops import autograd
from depthlm.ops.denseformer.naive import weighted_reads

from ..inputs import assert_same_gradients, normal

formula = inspect.unwrap(weighted_reads)


@pytest.mark.parametrize("chunk", [2**15, 12])
@settings(max_examples=10)
@given(reads=st.integers(1, 4), n=st.integers(1, 5), t=st.integers(1, 9), d=st.integers(1, 6), started=st.booleans())
def test_reads_equal_the_formula(chunk: int, reads: int, n: int, t: int, d: int, started: bool) -> None:
    xs, weights = [normal(2, t, d, seed=j) for j in range(1, n + 1)], normal(reads, n)
    start = normal(reads, 2, t, d, seed=30) if started else None
    inputs = [weights, *xs] if start is None else [weights, *xs, start]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "CHUNK", chunk)
        assert_same_gradients(weighted_reads(weights, xs, start), formula(weights, xs, start), inputs)


def test_two_phases_equal_one() -> None:
    xs, weights = [normal(2, 5, 4, seed=j) for j in range(5)], normal(3, 5)
    halves = weighted_reads(weights[:, 3:], xs[3:], weighted_reads(weights[:, :3], xs[:3]))
    assert_same_gradients(halves, weighted_reads(weights, xs), [weights, *xs])


def test_a_source_used_twice_gets_both_gradients() -> None:
    x, weights = normal(2, 3, 4), normal(1, 2)
    assert_same_gradients(weighted_reads(weights, [x, x]), formula(weights, [x, x]), [weights, x])


def test_result_has_the_widest_dtype_of_the_sources() -> None:
    xs = [normal(2, 3, 4, seed=j).bfloat16() for j in range(2)]
    assert weighted_reads(normal(1, 2).float(), xs).dtype == torch.bfloat16
    assert weighted_reads(normal(1, 2).float(), [xs[0].float(), xs[1]]).dtype == torch.float32
