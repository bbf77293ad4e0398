"""Operators on parallel streams equal their definitions, and their gradients equal numerical derivatives."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlm.ops.mhc import naive
from depthlm.ops.mhc.cpu import (
    Form,
    Parameters,
    Pending,
    mhc_maps,
    normed_projection,
    read_streams,
    sinkhorn,
    write_streams,
)

from ..inputs import normal


def written(x: torch.Tensor, y: torch.Tensor, post: torch.Tensor, res: torch.Tensor | None = None) -> torch.Tensor:
    return write_streams(x, Pending(y, post, res))


@settings(max_examples=6)
@given(n=st.integers(1, 4), t=st.integers(1, 4), d=st.integers(1, 5))
def test_read_and_write_streams(n: int, t: int, d: int) -> None:
    pre, post, res = normal(2, t, n), normal(2, t, n, seed=1), normal(2, t, n, n, seed=2)
    x, y = normal(2, t, n, d, seed=3), normal(2, t, d, seed=4)
    torch.testing.assert_close(read_streams(pre, x), naive.read_streams(pre, x))
    for maps in ((post, res), (post,)):
        pending = Pending(y, post, res if len(maps) == 2 else None)
        torch.testing.assert_close(write_streams(x, pending), naive.write_streams(x, pending))
        assert torch.autograd.gradcheck(written, (x, y, *maps))
    assert torch.autograd.gradcheck(read_streams, (pre, x))


@settings(max_examples=6)
@given(
    n=st.integers(1, 3), d=st.integers(1, 4), iterations=st.integers(1, 4), weighted=st.booleans(),
    identity=st.booleans(), form=st.builds(Form, *[st.sampled_from([0.0, 0.1])] * 4),
)  # fmt: skip
def test_maps(n: int, d: int, iterations: int, weighted: bool, identity: bool, form: Form) -> None:
    m, factors = (2 * n, 2) if identity else (n * (n + 2), 3)
    x, norm = normal(2, 3, n, d), normal(n * d, seed=2) if weighted else None
    parameters = Parameters(normal(m, n * d, seed=1), norm, normal(factors, seed=3), normal(m, seed=4))
    results = [maps(x, parameters, 1e-5, iterations, form) for maps in (mhc_maps, naive.mhc_maps)]
    torch.testing.assert_close(*results)
    assert (results[0].res_btij is None) == identity
    results = [[y for y in result if y is not None] for result in results]
    along = [normal(*y.shape, seed=5).detach() for y in results[0]]
    inputs = [x, *(y for y in parameters if y is not None)]
    torch.testing.assert_close(*(torch.autograd.grad(result, inputs, along) for result in results))


@settings(max_examples=6)
@given(n=st.integers(1, 4), w=st.integers(1, 5), m=st.integers(1, 5), eps=st.sampled_from([1e-5, 0.1]))
def test_normed_projection(n: int, w: int, m: int, eps: float) -> None:
    x, weight = normal(2, 3, n, w), normal(m, w, seed=1)
    expected = (x / (x.square().mean(-1, keepdim=True) + eps).sqrt()) @ weight.mT
    torch.testing.assert_close(normed_projection(x, weight, eps), expected)
    assert torch.autograd.gradcheck(lambda x, weight: normed_projection(x, weight, eps), (x, weight))


@settings(max_examples=6)
@given(n=st.integers(1, 5), iterations=st.integers(1, 6), eps=st.sampled_from([0.0, 1e-6, 0.1]))
def test_sinkhorn(n: int, iterations: int, eps: float) -> None:
    logits = normal(2, 3, n, n)
    torch.testing.assert_close(sinkhorn(logits, iterations, eps), naive.sinkhorn(logits, iterations, eps))
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, iterations, eps), (logits,))


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
    expected = written(x, y, post, res)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, read = written(x, y, post, res), read_streams(post, x)
    assert read.dtype == mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, expected, rtol=0, atol=0)
