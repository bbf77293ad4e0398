"""The dtypes and the rounding of operators in PyTorch, whose formulas `tests/model/test_literal.py` checks."""

import pytest
import torch

from depthlm.ops.depth_attention.cpu import depth_weights
from depthlm.ops.depth_attention.naive import depth_value_mix
from depthlm.ops.depth_reduce import weighted_sum
from depthlm.ops.kimi_delta.attention import gated_rms_norm, l2_norm, short_convolution
from depthlm.ops.mhc.cpu import Pending, read_streams, sinkhorn, write_streams

from .inputs import normal


def test_sinkhorn_of_large_logits_is_finite():
    logits = (100 * normal(2, 3, 4, 4)).detach().float().requires_grad_()
    result = sinkhorn(logits, 20)
    result.square().sum().backward()
    assert result.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    torch.testing.assert_close(result.sum(-1), torch.ones(2, 3, 4))


def test_autocast_does_not_round_the_streams():
    res, post = normal(2, 3, 4, 4).detach().float(), normal(2, 3, 4).detach().float()
    x, y = normal(2, 3, 4, 8).detach().float(), normal(2, 3, 8).detach().bfloat16()
    expected = write_streams(x, Pending(y, post, res))
    with torch.autocast("cpu", torch.bfloat16):
        mixed, read = write_streams(x, Pending(y, post, res)), read_streams(post, x)
    assert read.dtype == mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, expected, rtol=0, atol=0)


def test_weights_over_depth_are_fp32_and_the_mix_has_the_dtype_of_the_values():
    q, key, value = (x.detach().bfloat16() for x in (normal(1, 2, 3, 4), normal(1, 1, 3, 4), normal(1, 1, 3, 4)))
    assert depth_weights(q, [key, key]).dtype == torch.float32
    assert depth_value_mix(q, [key, key], [value, value]).dtype == torch.bfloat16
    assert depth_value_mix(q, [key, key], [value, value.float()]).dtype == torch.float32


@pytest.mark.parametrize("n", [1, 40])
def test_16_bit_sums_are_rounded_once(n):
    xs, weights = [normal(2, 7, 33, seed=seed).detach().bfloat16() for seed in range(n)], normal(n).detach().bfloat16()
    exact = sum(w.double() * x.double() for w, x in zip(weights, xs, strict=True))
    torch.testing.assert_close(weighted_sum(weights, xs), exact.bfloat16(), rtol=2**-8, atol=1e-6)


def test_the_convolution_of_delta_attention_computes_in_fp32():
    x, weight = normal(2, 9, 5).detach().bfloat16(), normal(5, 4, seed=1).detach().float()
    y, cache = short_convolution(x, weight)
    expected, _ = short_convolution(x.float(), weight)
    torch.testing.assert_close(y, expected.bfloat16(), rtol=2**-7, atol=1e-6)
    assert cache.dtype == torch.bfloat16


def test_the_norms_of_delta_attention_compute_in_fp32():
    assert l2_norm(torch.zeros(2, 5, dtype=torch.bfloat16)).eq(0).all()
    x, gate, weight = (normal(*shape, seed=i).detach() for i, shape in enumerate([(2, 9, 5), (2, 9, 5), (5,)]))
    low = [y.bfloat16() for y in (x, gate)]
    exact = gated_rms_norm(*(y.double() for y in low), weight, 1e-5)
    torch.testing.assert_close(gated_rms_norm(*low, weight, 1e-5), exact.bfloat16(), rtol=2**-7, atol=0)
