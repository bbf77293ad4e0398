"""The short convolution and the norms of delta attention equal PyTorch's operators and their formulas."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from depthlm.ops.kimi_delta.attention import gated_rms_norm, l2_norm, short_convolution

from ..inputs import normal

B, T, C = 2, 9, 5


def expected(x: Tensor, weight: Tensor) -> Tensor:
    total = F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], groups=C)
    return F.silu(total).mT


@pytest.mark.parametrize("t", [2, T])
def test_the_convolution_equals_that_of_pytorch(t: int) -> None:
    arguments = [normal(B, t, C), normal(C, 4, seed=1)]
    grad = normal(B, t, C, seed=2)
    found = [
        (y, *torch.autograd.grad(y, arguments, grad)) for y in (short_convolution(*arguments)[0], expected(*arguments))
    ]
    torch.testing.assert_close(*found)


def test_a_cache_continues_a_sequence() -> None:
    x, weight = normal(B, T, C), normal(C, 4, seed=1)
    cache, pieces = None, []
    for piece in x.split((1, 4, 1, 1, 2), dim=1):
        y, cache = short_convolution(piece, weight, cache)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected(x, weight))
    torch.testing.assert_close(cache, x[:, -3:])


@pytest.mark.parametrize("cuts", [(T,), (4, 1, 1, 3)])
def test_documents_equal_separate_sequences(cuts: tuple[int, ...]) -> None:
    x, weight = normal(1, T, C), normal(C, 4, seed=1)
    ends = [4, 5, 7]
    starts_bt = torch.zeros(1, T, dtype=torch.bool)
    starts_bt[0, ends] = True
    cache, pieces = None, []
    for piece, starts in zip(x.split(cuts, dim=1), starts_bt.split(cuts, dim=1), strict=True):
        y, cache = short_convolution(piece, weight, cache, starts)
        pieces.append(y)
    alone = [expected(piece, weight) for piece in x.tensor_split(ends, dim=1)]
    grad = normal(1, T, C, seed=2)
    found = [(y, *torch.autograd.grad(y, (x, weight), grad)) for y in (torch.cat(ys, dim=1) for ys in (pieces, alone))]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(cache, F.pad(x[:, 7:], (0, 0, 1, 0)))


def test_bf16_computes_in_fp32() -> None:
    x, weight = normal(B, T, C).detach().bfloat16(), normal(C, 4, seed=1).detach().float()
    y, cache = short_convolution(x, weight)
    torch.testing.assert_close(y, expected(x.float(), weight).bfloat16(), rtol=2**-7, atol=1e-6)
    assert cache.dtype == torch.bfloat16


def test_the_norms_equal_their_formulas() -> None:
    x, gate, weight = normal(B, T, C), normal(B, T, C, seed=1), normal(C, seed=2)
    expected_norm = F.rms_norm(x, (C,), weight, 1e-5) * gate.sigmoid()
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, 1e-5), expected_norm)
    torch.testing.assert_close(l2_norm(x, 0.1), x / (x.square().sum(-1, keepdim=True) + 0.1).sqrt())
    assert l2_norm(torch.zeros(2, C, dtype=torch.bfloat16)).eq(0).all()
    low = [y.detach().bfloat16() for y in (x, gate)]
    exact = gated_rms_norm(*(y.double() for y in low), weight, 1e-5)
    torch.testing.assert_close(gated_rms_norm(*low, weight, 1e-5), exact.bfloat16(), rtol=2**-7, atol=0)
