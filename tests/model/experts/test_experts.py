"""Experts compute what a loop over tokens computes, with grouped products and without."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from depthlm.model.experts import experts as module
from depthlm.model.experts.experts import Experts, expert_ends


def literal(experts: Experts, x_rd: Tensor, experts_rk: Tensor, weights_rk: Tensor) -> Tensor:
    rows = []
    for x_d, numbers, weights in zip(x_rd, experts_rk.tolist(), weights_rk, strict=True):
        outputs = [
            experts.down_proj[i] @ (F.silu(experts.gate_proj[i] @ x_d) * (experts.up_proj[i] @ x_d)) for i in numbers
        ]
        rows.append(sum(w * y_d for w, y_d in zip(weights, outputs, strict=True)))
    return torch.stack(rows)


def case(dtype: torch.dtype, width: int, chosen: int) -> tuple[Experts, list[Any]]:
    """Return five experts, of which tokens are sent only to the first `chosen`, and their inputs."""
    torch.manual_seed(0)
    experts = Experts(5, 16, width).to(dtype)
    for parameter in experts.parameters():
        parameter.data.normal_(0, 0.3)
    x_rd = torch.randn(23, 16, dtype=dtype, requires_grad=True)
    experts_rk = torch.rand(23, chosen).topk(2).indices
    weights_rk = torch.rand(23, 2, dtype=dtype, requires_grad=True)
    return experts, [x_rd, experts_rk, weights_rk]


def gradients(y: Tensor, experts: Experts, x: Tensor, weights: Tensor) -> list[Tensor]:
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return list(torch.autograd.grad(y, [x, weights, *experts.parameters()], upstream))


@pytest.mark.parametrize(("chosen", "width"), [(5, 8), (5, 3), (2, 8)])
def test_output_and_gradients_equal_a_loop_over_tokens(chosen, width):
    experts, (x, numbers, weights) = case(torch.float64, width, chosen)
    y, expected = experts(x, numbers, weights, expert_ends(numbers, 5)), literal(experts, x, numbers, weights)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (gradients(each, experts, x, weights) for each in (y, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chosen", [5, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_grouped_products_equal_a_loop_over_experts(monkeypatch, dtype, tolerance, chosen):
    experts, (x, numbers, weights) = case(dtype, 8, chosen)
    assert module.takes_grouped(x, experts.gate_proj)
    results = []
    for grouped in (True, False):
        if not grouped:
            monkeypatch.setattr(module, "GROUPED", {})
        y = experts(x, numbers, weights, expert_ends(numbers, 5))
        results.append([y, *gradients(y, experts, x, weights)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_ends_count_the_tokens_of_each_expert():
    numbers = torch.tensor([[4, 0], [0, 2], [4, 2], [4, 0]])
    assert expert_ends(numbers, 6).tolist() == [3, 3, 5, 5, 8, 8]
