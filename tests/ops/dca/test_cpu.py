"""Several gated sums at once, in one phase and in two, equal the definition, and so do all gradients."""

import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlm.ops import autograd
from depthlm.ops.dca.naive import gated_reads

from ..inputs import assert_same_gradients, normal

formula = inspect.unwrap(gated_reads)


@pytest.mark.parametrize("chunk", [2**15, 12])
@settings(max_examples=10)
@given(reads=st.integers(1, 4), n=st.integers(1, 5), t=st.integers(1, 9), d=st.integers(1, 6), started=st.booleans())
def test_reads_equal_the_formula(chunk: int, reads: int, n: int, t: int, d: int, started: bool) -> None:
    xs = [normal(2, t, d, seed=j) for j in range(1, n + 1)]
    b, w = normal(reads, n, d, seed=20), normal(reads, n, d, seed=21)
    start = normal(reads, 2, t, d, seed=30) if started else None
    inputs = [b, w, *xs] if start is None else [b, w, *xs, start]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "CHUNK", chunk)
        assert_same_gradients(gated_reads(b, w, xs, start), formula(b, w, xs, start), inputs)


def test_two_phases_equal_one() -> None:
    xs, b, w = [normal(2, 5, 4, seed=j) for j in range(5)], normal(3, 5, 4), normal(3, 5, 4, seed=20)
    halves = gated_reads(b[:, 3:], w[:, 3:], xs[3:], gated_reads(b[:, :3], w[:, :3], xs[:3]))
    assert_same_gradients(halves, gated_reads(b, w, xs), [b, w, *xs])


def test_result_has_the_widest_dtype_of_the_sources() -> None:
    xs = [normal(2, 3, 4, seed=j).detach().bfloat16().requires_grad_() for j in range(2)]
    out = gated_reads(normal(1, 2, 4).float(), normal(1, 2, 4).float(), [xs[0].float(), xs[1]])
    assert out.dtype == xs[0].float().dtype
    out.sum().backward()
    assert xs[1].grad.dtype == xs[1].dtype
