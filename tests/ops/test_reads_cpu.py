"""Several reads at once in PyTorch, also in parts, equal the definitions, and so do all gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlm.ops import autograd

from .depth_reads import READS, parameters_of, read, results, tensors
from .inputs import single as normal

of_each = pytest.mark.parametrize("kind", READS)


@of_each
@settings(max_examples=15)
@given(
    reads=st.integers(1, 4), n=st.integers(1, 5), t=st.integers(1, 9), d=st.integers(1, 6), started=st.booleans(),
    biased=st.booleans(), eps=st.sampled_from([None, 1e-5, 0.1]), chunk=st.sampled_from([2**15, 12]),
)  # fmt: skip
def test_reads_equal_the_definition(kind, reads, n, t, d, started, biased, eps, chunk):
    arguments = tensors(kind, reads, n, t, d, started, biased)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "CHUNK", chunk)
        found, expected = (results(kind, kernels, arguments, torch.float64, eps) for kernels in ("torch", "naive"))
    torch.testing.assert_close(found, expected)


@of_each
def test_a_source_used_twice_gets_both_gradients(kind):
    x = normal(3, 4, seed=1).double().requires_grad_()
    parameters = [None if y is None else y.double() for y in parameters_of(kind, 2, 3, 4)]
    (twice,) = torch.autograd.grad(read(kind, parameters, [x, x, x], ())[0].sum(), x)
    alone = [x.detach().clone().requires_grad_() for _ in range(3)]
    torch.testing.assert_close(twice, sum(torch.autograd.grad(read(kind, parameters, alone, ())[0].sum(), alone)))


@of_each
def test_the_result_has_the_widest_dtype_of_the_sources(kind):
    parameters, xs = parameters_of(kind, 2, 2, 4), [normal(3, 4, seed=j).bfloat16().requires_grad_() for j in (1, 2)]
    out, *lse = read(kind, parameters, xs, ())
    assert [out.dtype, *(x.dtype for x in lse)] == [torch.bfloat16, *[torch.float32] * (kind == "attend")]
    mixed, *_ = read(kind, parameters, [xs[0].float(), xs[1]], ())
    assert mixed.dtype == torch.float32
    mixed.sum().backward()
    assert xs[1].grad is not None
    assert xs[1].grad.dtype == torch.bfloat16


def test_autocast_does_not_round_the_scores():
    parameters, xs = parameters_of("attend", 2, 2, 16), [normal(3, 16, seed=j) for j in (1, 2)]
    expected = read("attend", parameters, xs, ())
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(read("attend", parameters, xs, ()), expected, rtol=0, atol=0)
