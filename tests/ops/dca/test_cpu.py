"""Several sums at once, in one phase and in two, equal the definitions, and so do all gradients."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthlm.ops import call
from depthlm.ops.dca.naive import gated_reads
from depthlm.ops.denseformer.naive import weighted_reads

from ..inputs import normal

weighted, gated = inspect.unwrap(weighted_reads), inspect.unwrap(gated_reads)


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected)
    along = normal(*expected.shape, seed=50).detach()
    torch.testing.assert_close(torch.autograd.grad(found, inputs, along), torch.autograd.grad(expected, inputs, along))


@pytest.mark.parametrize("chunk", [2**15, 12])
@settings(max_examples=10, deadline=None)
@given(reads=st.integers(1, 4), n=st.integers(1, 5), t=st.integers(1, 9), d=st.integers(1, 6), started=st.booleans())
def test_reads_equal_the_formulas(chunk: int, reads: int, n: int, t: int, d: int, started: bool) -> None:
    xs, start = [normal(2, t, d, seed=j) for j in range(1, n + 1)], normal(reads, 2, t, d, seed=30)
    inputs = [*xs, start] if started else xs
    given_start = start if started else None
    weights, bias, gate = normal(reads, n), normal(reads, n, d, seed=20), normal(reads, n, d, seed=21)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "CHUNK", chunk)
        found = weighted_reads(weights, xs, given_start)
        assert_same(found, weighted(weights, xs, given_start), [weights, *inputs])
        found = gated_reads(bias, gate, xs, given_start)
        assert_same(found, gated(bias, gate, xs, given_start), [bias, gate, *inputs])


def test_two_phases_equal_one() -> None:
    xs, weights, bias, gate = (
        [normal(2, 5, 4, seed=j) for j in range(5)],
        normal(3, 5),
        normal(3, 5, 4),
        normal(3, 5, 4),
    )
    halves = weighted_reads(weights[:, 3:], xs[3:], weighted_reads(weights[:, :3], xs[:3]))
    assert_same(halves, weighted_reads(weights, xs), [weights, *xs])
    halves = gated_reads(bias[:, 3:], gate[:, 3:], xs[3:], gated_reads(bias[:, :3], gate[:, :3], xs[:3]))
    assert_same(halves, gated_reads(bias, gate, xs), [bias, gate, *xs])


def test_a_source_used_twice_gets_both_gradients() -> None:
    x, weights = normal(2, 3, 4), normal(1, 2)
    assert_same(weighted_reads(weights, [x, x]), weighted(weights, [x, x]), [weights, x])


def test_result_has_the_widest_dtype_of_the_sources() -> None:
    xs = [normal(2, 3, 4, seed=j).detach().bfloat16().requires_grad_() for j in range(2)]
    assert weighted_reads(normal(1, 2).float(), xs).dtype == torch.bfloat16
    out = gated_reads(normal(1, 2, 4).float(), normal(1, 2, 4).float(), [xs[0].float(), xs[1]])
    assert out.dtype == torch.float32
    out.sum().backward()
    assert xs[1].grad.dtype == torch.bfloat16
