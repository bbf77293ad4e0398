"""Loss and gradients of decoders, and their comparison."""

import torch
from torch import Tensor

from depthlm.model import Decoder


def random_batch(length: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of two rows."""
    tokens = torch.randint(0, 320, (2, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def loss_and_gradients(model: Decoder, length: int = 16) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss per token of a batch, and the gradient of every parameter."""
    model.zero_grad()
    sums = model(*random_batch(length))
    loss = sums.nll / sums.tokens
    loss.backward()
    return loss.detach(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def assert_same(model: Decoder, other: Decoder, tolerance: float) -> None:
    """Compare loss and gradients of two decoders. The tolerance is relative to each parameter's largest gradient."""
    (expected, expected_grads), (loss, grads) = loss_and_gradients(model), loss_and_gradients(other)
    torch.testing.assert_close(loss, expected, rtol=max(tolerance, 1e-7), atol=0)
    largest = max(grad.abs().max() for grad in expected_grads.values())
    for name, grad in grads.items():
        # some gradients are zero except for rounding, such as that of a factor that the next norm removes
        bound = tolerance * max(expected_grads[name].abs().max(), 1e-3 * largest)
        assert (grad - expected_grads[name]).abs().max() <= bound, name
