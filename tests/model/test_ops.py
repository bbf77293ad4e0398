"""Every preset reaches the same loss with fused kernels, in PyTorch and with the definitions of its operators."""

import os
from typing import Any

import pytest
import torch

from .gradients import assert_same

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# one preset of each fused operator
QUICK = ("attention_residuals_recency", "dca", "denseformer", "depth_attention", "hyper_connections", "mhc", "moda")
# test_fused_streams has four streams and all iterations too
FEWER = {
    "hyper_connections": ["model.connection.num_streams=2"],
    "mhc": ["model.connection.num_streams=2", "model.connection.iterations=3"],
}
# presets without a fused operator are not tested
SHIPPED = ("attention_residuals_inkling2", "mhc_deepseek_v4", "mhc_hunyuan_v4")
FUSED = (*QUICK, "attention_residuals", "attention_residuals_full", "grn_v1", "grn_v3", *SHIPPED)
# the others run the kernels of these
DISTINCT = (*QUICK, "attention_residuals")
needs_triton = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="no GPU, and Triton's interpreter is off"
)


def losses(build: Any, preset: str, kernels: str, steps: int, learning_rate: float) -> torch.Tensor:
    """Return the losses per token before, between and after `steps` steps of AdamW."""
    model = build(f"model={preset}", "size.num_layers=2", *FEWER.get(preset, [])).to(DEVICE)
    model.kernels = kernels
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    # few, since Triton's interpreter takes time for every position
    tokens = torch.randint(0, 320, (1, 4), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = []
    for step in range(steps + 1):
        sums = model(tokens[:, :-1], tokens[:, 1:])
        loss = sums.nll / sums.tokens
        found.append(loss.detach())
        if step < steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return torch.stack(found)


@pytest.mark.parametrize("preset", FUSED)
def test_the_definitions_give_the_same_gradients(build: Any, preset: str) -> None:
    torch_model, naive = (build(f"model={preset}", "size.num_layers=5").double() for _ in range(2))
    torch_model.kernels, naive.kernels = "torch", "naive"
    assert_same(torch_model, naive, tolerance=1e-9)


@needs_triton
@pytest.mark.parametrize("preset", QUICK)
def test_one_step_equals_pytorch(build: Any, preset: str) -> None:
    fused, plain = (losses(build, preset, kernels, 1, 1e-3) for kernels in ("triton", "torch"))
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("preset", DISTINCT)
def test_four_steps_equal_pytorch(build: Any, preset: str) -> None:
    fused, plain = (losses(build, preset, kernels, 4, 2e-3) for kernels in ("triton", "torch"))
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
    assert fused[-1] < 0.9 * fused[0]
