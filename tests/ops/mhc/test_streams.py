"""Operators on parallel streams equal their formulas, and their gradients equal numerical derivatives."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlm.ops.mhc.streams import mix_streams, normed_projection, read_streams, sinkhorn

from ..inputs import normal


@settings(max_examples=10, deadline=None)
@given(n=st.integers(1, 4), t=st.integers(1, 4), d=st.integers(1, 5))
def test_read_and_mix_streams(n: int, t: int, d: int) -> None:
    pre, post, res = normal(2, t, n), normal(2, t, n, seed=1), normal(2, t, n, n, seed=2)
    x, y = normal(2, t, n, d, seed=3), normal(2, t, d, seed=4)
    torch.testing.assert_close(read_streams(pre, x), torch.einsum("btj,btjd->btd", pre, x))
    expected = torch.einsum("btij,btjd->btid", res, x) + torch.einsum("bti,btd->btid", post, y)
    torch.testing.assert_close(mix_streams(res, x, post, y), expected)
    assert torch.autograd.gradcheck(read_streams, (pre, x))
    assert torch.autograd.gradcheck(mix_streams, (res, x, post, y))


@settings(max_examples=10, deadline=None)
@given(n=st.integers(1, 4), w=st.integers(1, 5), m=st.integers(1, 5), eps=st.sampled_from([1e-5, 0.1]))
def test_normed_projection(n: int, w: int, m: int, eps: float) -> None:
    x, weight = normal(2, 3, n, w), normal(m, w, seed=1)
    expected = (x / (x.square().mean(-1, keepdim=True) + eps).sqrt()) @ weight.mT
    torch.testing.assert_close(normed_projection(x, weight, eps), expected)
    assert torch.autograd.gradcheck(lambda x, weight: normed_projection(x, weight, eps), (x, weight))


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 5), iterations=st.integers(1, 6))
def test_sinkhorn(n: int, iterations: int) -> None:
    logits = normal(2, 3, n, n)
    expected = logits.exp()
    for _ in range(iterations):
        expected = expected / expected.sum(-2, keepdim=True)
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(sinkhorn(logits, iterations), expected)
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, iterations), (logits,))


def test_sinkhorn_of_large_logits_is_finite() -> None:
    logits = (100 * normal(2, 3, 4, 4)).detach().float().requires_grad_()
    result = sinkhorn(logits, 20)
    result.square().sum().backward()
    assert result.isfinite().all()
    assert logits.grad.isfinite().all()
    torch.testing.assert_close(result.sum(-1), torch.ones(2, 3, 4))


def test_autocast_does_not_round_the_streams() -> None:
    res, post = normal(2, 3, 4, 4).detach().float(), normal(2, 3, 4).detach().float()
    x, y = normal(2, 3, 4, 8).detach().float(), normal(2, 3, 8).detach().bfloat16()
    expected = mix_streams(res, x, post, y)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, read = mix_streams(res, x, post, y), read_streams(post, x)
    assert read.dtype == mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, expected, rtol=0, atol=0)
