"""The chunked loss of a head equals that of full logits, and never materializes them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from depthlm.ops.cross_entropy import chunked as module
from depthlm.ops.cross_entropy.chunked import cross_entropy, linear_cross_entropy
from depthlm.ops.cross_entropy.naive import linear_cross_entropy as whole

ROWS, WIDTH, VOCABULARY = 23, 6, 37


@pytest.fixture
def chunk_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the rows per chunk, with two rows in fp32 at a time."""

    def use(rows: int, vocabulary: int = VOCABULARY) -> None:
        monkeypatch.setattr(module, "WHOLE", rows * vocabulary)
        monkeypatch.setattr(module, "PRODUCT", rows * vocabulary)
        monkeypatch.setattr(module, "CHUNK", 2 * vocabulary)

    return use


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(bias: bool = True) -> list[Tensor]:
    return [2 * normal(ROWS, WIDTH), normal(VOCABULARY, WIDTH, seed=1), *([normal(VOCABULARY, seed=2)] if bias else [])]


def targets() -> Tensor:
    """Targets of which the first three and the last are ignored."""
    found = torch.randint(0, VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(3))
    return found.index_fill(0, torch.tensor([0, 1, 2, ROWS - 1]), -100)


def results(function: Any, tensors: list[Tensor], autocast: bool = False) -> list[Tensor]:
    """Return nll and logsumexp of all targets that are not ignored, and every gradient of a loss of both."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    hidden, weight, bias = [*tensors, None][:3]
    counted = targets() != -100
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        nll, logsumexp = function(hidden, weight, bias, targets())
    a, b = normal(2, ROWS, seed=4).to(nll.dtype)
    loss = ((a * nll).where(counted, 0) + (b * logsumexp.square()).where(counted, 0)).sum()
    return [nll[counted], logsumexp[counted], *torch.autograd.grad(loss, tensors)]


# rows per chunk: one, several with a shorter last chunk, all but one, and all rows
@pytest.mark.parametrize(("bias", "rows"), [(False, 1), (True, 5), (False, ROWS - 1), (True, ROWS)])
def test_chunked_loss_equals_full_loss(chunk_of, bias, rows):
    chunk_of(rows)
    expected = results(whole, inputs(bias))
    for kind, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        found = results(linear_cross_entropy, [x.to(kind) for x in inputs(bias)])
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == kind
            largest = max(1.0, theirs.abs().max().item())
            torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("rows", [1, 5])
def test_chunked_loss_under_autocast_equals_full_loss_in_bf16(chunk_of, rows):
    """The logits are bitwise equal, and chunks of the weight's gradient are summed in fp32."""
    single = [x.float() for x in inputs()]
    chunk_of(ROWS)
    expected = results(linear_cross_entropy, single, autocast=True)
    chunk_of(rows)
    found = results(linear_cross_entropy, single, autocast=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-7 * theirs.abs().max().item())
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-6, atol=1e-6)


def test_weight_gradient_of_a_bf16_model_is_summed_in_fp32(chunk_of):
    """Rows that differ only in magnitude: in bf16, one gradient of 1 plus 22 of 2^-9 would remain 1."""
    chunk_of(1, vocabulary=1)
    hidden = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)
    weight = torch.zeros(1, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    sizes = torch.full((ROWS,), 2.0**-9).index_fill(0, torch.tensor([0]), 1.0)
    _, logsumexp = linear_cross_entropy(hidden, weight, None, torch.zeros(ROWS, dtype=torch.long))
    (grad,) = torch.autograd.grad((sizes * logsumexp).sum(), weight)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad, torch.full_like(grad, 1 + 22 * 2**-9))


def test_numerical_derivatives(chunk_of):
    chunk_of(2, vocabulary=7)
    tensors = [x.requires_grad_() for x in (normal(5, 3), normal(7, 3, seed=1), normal(7, seed=2))]
    assert torch.autograd.gradcheck(lambda *x: linear_cross_entropy(*x, torch.arange(5)), tensors)


def test_layout_does_not_matter(chunk_of):
    chunk_of(5)
    hidden, weight, bias = inputs()
    strided = [hidden.mT.contiguous().mT, weight.mT.contiguous().mT, bias]
    torch.testing.assert_close(results(linear_cross_entropy, strided), results(whole, inputs()))
    hidden = hidden.requires_grad_()
    nll, _ = linear_cross_entropy(hidden, weight, bias, targets().clamp(min=0))
    # the gradient of a sum is an expanded scalar
    (grad,) = torch.autograd.grad(nll.sum(), hidden)
    (expected,) = torch.autograd.grad(whole(hidden, weight, bias, targets().clamp(min=0))[0].sum(), hidden)
    torch.testing.assert_close(grad, expected)


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor)]
        self.numel = max([self.numel, *(x.numel() for x in tensors)])
        return result


def test_no_tensor_is_as_large_as_the_logits(chunk_of):
    """A dispatch mode does not see inside a custom operator, so the test calls its two functions directly."""
    chunk_of(4)
    hidden, weight, bias = (x.float() for x in inputs())
    for rows in (4, ROWS):
        with Largest() as largest:
            _, logsumexp = module.forward(hidden, [weight, bias], targets(), rows, torch.float32, False)
            rows_r = [targets(), logsumexp, *torch.ones(2, ROWS)]
            module.backward(hidden, [weight, bias], rows_r, rows, torch.float32, False)
        # the largest tensors are then the weights and a chunk
        assert largest.numel == max(rows * VOCABULARY, weight.numel())
    assert max(4 * VOCABULARY, weight.numel()) < ROWS * VOCABULARY / 3


@pytest.mark.slow
@pytest.mark.parametrize(("bias", "kind"), [(False, torch.float32), (True, torch.bfloat16)])
def test_operators_pass_opcheck(bias, kind):
    hidden, *parameters = (x.float().requires_grad_() for x in inputs(bias) if x is not None)
    torch.library.opcheck(module.chunked, (hidden, parameters, targets(), 5, kind, False))
    _, logsumexp = module.chunked(hidden, parameters, targets(), 5, kind, False)
    rows_r = [targets(), logsumexp.detach(), *torch.ones(2, ROWS).unbind()]
    parameters = [x.detach() for x in parameters]
    torch.library.opcheck(module.chunked_backward, (hidden.detach(), parameters, rows_r, 5, kind, False))


@pytest.mark.parametrize("chunk", [30, 2**20])
def test_cross_entropy_equals_pytorch(monkeypatch, chunk):
    monkeypatch.setattr(module, "CHUNK", chunk)
    logits, to = (5 * normal(7, 11)).float().requires_grad_(), torch.randint(0, 11, (7,))
    nll, logsumexp = cross_entropy(logits, to)
    torch.testing.assert_close(nll, F.cross_entropy(logits, to, reduction="none"))
    torch.testing.assert_close(logsumexp, logits.logsumexp(1))
    weights = normal(2, 7, seed=3).float()
    (grad,) = torch.autograd.grad((weights[0] * nll + weights[1] * logsumexp.square()).sum(), logits)
    expected = weights[0] * F.cross_entropy(logits, to, reduction="none") + weights[1] * logits.logsumexp(1) ** 2
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), logits)[0])
