"""Several reads at once, in one phase and in two, equal the definition, and so do all gradients."""

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthlm.ops import autograd
from depthlm.ops.attention_residuals.cpu import Start
from depthlm.ops.attention_residuals.naive import depth_attend

from ..inputs import normal

# the definition
formula = inspect.unwrap(depth_attend)


def assert_same(found: Start, expected: Start, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected)
    along = [normal(*x.shape, seed=50 + i).detach() for i, x in enumerate(expected)]
    torch.testing.assert_close(torch.autograd.grad(found, inputs, along), torch.autograd.grad(expected, inputs, along))


@settings(max_examples=20)
@given(
    reads=st.integers(1, 4), n=st.integers(1, 5), t=st.integers(1, 9), d=st.integers(1, 6),
    eps=st.sampled_from([None, 1e-5, 0.1]), biased=st.booleans(), started=st.booleans(),
)  # fmt: skip
def test_reads_equal_the_formula(
    reads: int, n: int, t: int, d: int, eps: float | None, biased: bool, started: bool
) -> None:
    q, xs = normal(reads, d), [normal(2, t, d, seed=j) for j in range(1, n + 1)]
    bias = normal(n, seed=20) if biased else None
    start = (normal(reads, 2, t, d, seed=30), normal(reads, 2, t, seed=31)) if started else None
    inputs = [q, *xs, *([] if bias is None else [bias]), *(start or ())]
    assert_same(depth_attend(q, xs, eps, bias, start), formula(q, xs, eps, bias, start), inputs)


def test_positions_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "CHUNK", 12)
    q, xs = normal(2, 4), [normal(2, 5, 4, seed=j) for j in range(1, 4)]
    start = normal(2, 2, 5, 4, seed=30), normal(2, 2, 5, seed=31)
    assert_same(depth_attend(q, xs, 1e-5, None, start), formula(q, xs, 1e-5, None, start), [q, *xs, *start])


def test_two_phases_equal_one() -> None:
    q, xs = normal(3, 4), [normal(2, 5, 4, seed=j) for j in range(1, 7)]
    halves = depth_attend(q, xs[4:], 1e-5, start=depth_attend(q, xs[:4], 1e-5))
    assert_same(halves, depth_attend(q, xs, 1e-5), [q, *xs])


def test_a_source_used_twice_gets_both_gradients() -> None:
    q, x = normal(2, 4), normal(3, 4, seed=1)
    assert_same(depth_attend(q, [x, x], 1e-5), formula(q, [x, x], 1e-5, None, None), [q, x])


def test_autocast_does_not_round_the_scores() -> None:
    q, xs = normal(2, 16).detach().float(), [normal(3, 16, seed=j).detach().float() for j in (1, 2)]
    expected: Any = depth_attend(q, xs, 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(depth_attend(q, xs, 1e-5), expected, rtol=0, atol=0)


def test_result_has_the_widest_dtype_of_the_sources() -> None:
    q, xs = normal(2, 4).float(), [normal(3, 4, seed=j).detach().bfloat16().requires_grad_() for j in (1, 2)]
    out, lse = depth_attend(q, xs, 1e-5)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert depth_attend(q, [xs[0].float(), xs[1]], 1e-5)[0].dtype == torch.float32
    out.float().sum().backward()
    assert xs[0].grad.dtype == torch.bfloat16
