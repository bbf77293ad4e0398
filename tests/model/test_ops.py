"""Decoders compute the same with fused kernels, in PyTorch, and with streams that the backward pass computes again."""

import copy
import os
from typing import Any

import pytest
import torch

from depthlm.mechanisms import hyper_connections, mhc
from depthlm.model import compile_sublayers

from .gradients import loss_and_gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# one preset of each fused operator
QUICK = ("attention_residuals_recency", "dca", "denseformer", "depth_attention", "hyper_connections", "mhc", "moda")
# test_triton_gives_the_gradients_of_pytorch has more streams and all iterations
FEWER = {
    "hyper_connections": ["model.connection.num_streams=2"],
    "mhc": ["model.connection.num_streams=2", "model.connection.iterations=3"],
    "mhc_deepseek_v41": ["model.connection.num_streams=2", "model.connection.iterations=3"],
}
DISTINCT = (*QUICK, "attention_residuals", "mhc_deepseek_v41")
needs_triton = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="no GPU, and Triton's interpreter is off"
)


def losses(build: Any, preset: str, kernels: str) -> torch.Tensor:
    """Return the losses per token before, between and after four steps of AdamW."""
    model = build(f"model={preset}", "size.num_layers=2", *FEWER.get(preset, [])).to(DEVICE)
    model.kernels = kernels
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # few, since Triton's interpreter takes time for every position
    tokens = torch.randint(0, 320, (1, 4), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = []
    for _ in range(5):
        sums = model(tokens[:, :-1], tokens[:, 1:])
        loss = sums.nll / sums.tokens
        found.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.stack(found)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("preset", DISTINCT)
def test_four_steps_equal_pytorch(build, preset):
    fused, plain = (losses(build, preset, kernels) for kernels in ("triton", "torch"))
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
    assert fused[-1] < 0.9 * fused[0]


@needs_triton
@pytest.mark.parametrize(
    ("preset", "streams", "checkpointing"),
    [
        *((preset, None, False) for preset in QUICK if preset not in FEWER),
        ("hyper_connections", 2, True),
        ("mhc_deepseek_v4", 3, False),
        ("mhc_deepseek_v41", 2, False),
        pytest.param("hyper_connections", 4, False, marks=pytest.mark.slow),
        pytest.param("mhc", 4, True, marks=pytest.mark.slow),
        pytest.param("mhc_hunyuan_v4", 3, True, marks=pytest.mark.slow),
    ],
)
def test_triton_gives_the_gradients_of_pytorch(build, preset, streams, checkpointing):
    of_streams = [] if streams is None else [f"model.connection.num_streams={streams}"]
    model = build(f"model={preset}", "size.num_layers=2", *of_streams)
    model.activation_checkpointing = checkpointing
    compare(model, copy.deepcopy(model))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("preset", ["hyper_connections", "mhc"])
def test_compiled_sublayers_with_triton_equal_pytorch(build, preset):
    torch.compiler.reset()
    model = build(f"model={preset}", "size.num_layers=2")
    other = copy.deepcopy(model)
    compile_sublayers(other, backend="aot_eager")
    compare(model, other)


def compare(model: Any, other: Any) -> None:
    model.kernels, other.kernels = "torch", "triton"
    (expected, expected_grads), (loss, grads) = (loss_and_gradients(m, length=3) for m in (model, other))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name, grad in grads.items():
        assert (grad - expected_grads[name]).abs().max() <= 1e-4 * expected_grads[name].abs().max() + 1e-7, name


@pytest.mark.parametrize("name", ["mhc", "hyper_connections"])
def test_a_decoder_that_rebuilds_has_the_same_gradients(build, name, monkeypatch):
    model = build(f"model={name}", "size.num_layers=6")
    tokens = torch.arange(12).view(2, 6)
    results = []
    for rebuilds in (False, True):
        for module in (hyper_connections, mhc):
            monkeypatch.setattr(module, "rebuilds", lambda *_, rebuilds=rebuilds: rebuilds)
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).nll.backward()
        results.append({key: parameter.grad.clone() for key, parameter in model.named_parameters()})
    plain, rebuilt = results
    for key in plain:
        assert torch.equal(plain[key], rebuilt[key]), key
