"""Reductions over sources equal plain sums, and their gradients equal numerical derivatives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlm.ops.depth_reduce import source_scores, weighted_sum


def sources(n: int, t: int = 3, d: int = 4, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, t, d, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(n)]


def normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


WEIGHTS = {"number": lambda n, t, d: (n,), "dimension": lambda n, t, d: (n, d), "token": lambda n, t, d: (n, 2, t)}
QUERIES = {"one": lambda n, t, d: (d,), "source": lambda n, t, d: (n, d), "token": lambda n, t, d: (2, t, d)}


@settings(max_examples=8)
@given(n=st.integers(1, 5), t=st.integers(1, 5), d=st.integers(1, 6), kind=st.sampled_from(sorted(WEIGHTS)))
def test_weighted_sum(n: int, t: int, d: int, kind: str) -> None:
    xs, weights = sources(n, t, d), normal(*WEIGHTS[kind](n, t, d))
    w = weights[..., None] if kind == "token" else weights
    expected = sum(w[j] * x for j, x in enumerate(xs))
    torch.testing.assert_close(weighted_sum(weights, xs), expected)
    assert torch.autograd.gradcheck(lambda w, *xs: weighted_sum(w, xs), (weights, *xs))


@settings(max_examples=10)
@given(
    n=st.integers(1, 5), t=st.integers(1, 5), d=st.integers(1, 6), kind=st.sampled_from(sorted(QUERIES)),
    eps=st.sampled_from([None, 1e-5, 0.1]),
)  # fmt: skip
def test_source_scores(n: int, t: int, d: int, kind: str, eps: float | None) -> None:
    xs, query = sources(n, t, d), normal(*QUERIES[kind](n, t, d))
    rms = [1.0 if eps is None else (x.square().mean(-1) + eps).sqrt() for x in xs]
    expected = torch.stack([(x * (query[j] if kind == "source" else query)).sum(-1) / rms[j] for j, x in enumerate(xs)])
    torch.testing.assert_close(source_scores(query, xs, eps), expected)
    assert torch.autograd.gradcheck(lambda q, *xs: source_scores(q, xs, eps), (query, *xs))


def test_positions_may_have_heads() -> None:
    """Sources x_btke with one weight and one query per head."""
    xs = [normal(2, 3, 2, 4).detach().add(j).requires_grad_() for j in range(3)]
    weights, query = normal(3, 2, 3, 2), normal(2, 3, 2, 4)
    torch.testing.assert_close(
        weighted_sum(weights, xs), sum(w[..., None] * x for w, x in zip(weights, xs, strict=True))
    )
    torch.testing.assert_close(source_scores(query, xs, None), torch.stack([(query * x).sum(-1) for x in xs]))
    assert torch.autograd.gradcheck(lambda w, *xs: weighted_sum(w, xs), (weights, *xs))
    assert torch.autograd.gradcheck(lambda q, *xs: source_scores(q, xs, None), (query, *xs))


def test_a_source_used_twice_gets_both_gradients() -> None:
    (x,), weights = sources(1), normal(3)
    weighted_sum(weights, [x, x, x]).sum().backward()
    torch.testing.assert_close(x.grad, weights.sum().expand_as(x))


def test_sum_has_the_widest_dtype_of_the_sources() -> None:
    wide, narrow = (x.detach() for x in sources(2))
    xs = [wide.float().requires_grad_(), narrow.bfloat16().requires_grad_()]
    weights = normal(2).detach().float().requires_grad_()
    total = weighted_sum(weights, xs)
    torch.testing.assert_close(total, weights[0] * xs[0] + weights[1] * xs[1].float())
    total.sum().backward()
    assert [x.grad.dtype for x in xs] == [torch.float32, torch.bfloat16]
    assert source_scores(normal(4).float(), xs, 1e-5).dtype == torch.float32


@pytest.mark.parametrize("n", [1, 40])
def test_16_bit_sums_are_rounded_once(n: int) -> None:
    xs = [x.detach().bfloat16() for x in sources(n, 7, 33)]
    weights = normal(n).detach().bfloat16()
    exact = sum(w.double() * x.double() for w, x in zip(weights, xs, strict=True))
    torch.testing.assert_close(weighted_sum(weights, xs), exact.bfloat16(), rtol=2**-8, atol=1e-6)
