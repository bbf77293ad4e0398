"""Losses and gradients of the Triton kernels of the head equal those of the PyTorch reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthlm.ops.cross_entropy import chunked
from depthlm.ops.cross_entropy.chunked import cross_entropy, linear_cross_entropy

from ..inputs import DEVICE
from ..inputs import single as normal

triton_ops = pytest.importorskip("depthlm.ops.cross_entropy.triton")


def targets_of(rows: int, vocabulary: int) -> Tensor:
    """Targets of which every third is ignored."""
    found = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(1))
    return found.where(torch.arange(rows) % 3 > 0, -100).to(DEVICE)


def loss(nll: Tensor, logsumexp: Tensor, targets: Tensor) -> Tensor:
    """Return a sum in which every row has other weights."""
    a, b = normal(2, len(targets), seed=2).to(nll.dtype)
    return (a * nll + b * logsumexp.square()).where(targets != -100, 0).sum()


def assert_same(logits: Tensor, tolerance: float) -> None:
    targets = targets_of(*logits.shape)
    results = []
    for fused, x in ((True, logits), (False, logits.double())):
        x = x.detach().requires_grad_()
        nll, logsumexp = cross_entropy(x, targets, fused)
        (grad,) = torch.autograd.grad(loss(nll, logsumexp, targets), x)
        results.append((nll[targets != -100], logsumexp, grad))
    for found, expected in zip(*results, strict=True):
        largest = max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * largest)


@settings(max_examples=6)
@given(rows=st.integers(1, 40), vocabulary=st.integers(1, 70), scale=st.sampled_from([0.1, 5.0, 300.0]))
def test_losses_and_gradients_equal_the_reference(rows, vocabulary, scale):
    # the softmax of the backward pass has the rounding error of the log-sum-exp, which grows with the logits
    assert_same(scale * normal(rows, vocabulary), 1e-5 * max(1.0, scale / 5))


def test_a_row_of_several_tiles():
    assert_same(5 * normal(3, 2 * triton_ops.COLUMNS + 3), 1e-5)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_in_any_layout(kind):
    assert_same((3 * normal(33, 5)).to(kind).mT, 2**-8 if kind is torch.bfloat16 else 2**-11)


def test_one_large_logit_and_a_row_of_equal_logits():
    logits = torch.zeros(2, 8, device=DEVICE)
    logits[0, 3] = 1e4
    assert_same(logits, 1e-5)


def test_the_chunked_loss_of_a_head_equals_the_reference(monkeypatch):
    for name in ("WHOLE", "GPU_WHOLE", "PRODUCT", "GPU_PRODUCT"):
        monkeypatch.setattr(chunked, name, 4 * 37)
    inputs, targets = (normal(11, 6), normal(37, 6, seed=3), normal(37, seed=4)), targets_of(11, 37)
    results = []
    for fused, kind in ((True, torch.float32), (False, torch.float64)):
        tensors = [x.to(kind).requires_grad_() for x in inputs]
        nll, logsumexp = linear_cross_entropy(*tensors, targets, fused)  # type: ignore[misc]
        results.append([logsumexp, *torch.autograd.grad(loss(nll, logsumexp, targets), tensors)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
