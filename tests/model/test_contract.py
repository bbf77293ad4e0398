"""Every preset works with a mixture of experts and on Kimi Linear: causality, generation with a cache, packed
documents, recomputation, compilation."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from depthlm.evaluation.generation import generate
from depthlm.model import compile_sublayers
from depthlm.model.decoder import Decoder

from .conftest import PRESETS

EXPERTS = ("size.num_experts=4", "backbone.router_bias_rate=0.01", "backbone.shared_experts=1")
QUICK = {("mhc", "qwen3_moe"), ("moda", "qwen3_moe"), ("moda", "kimi_linear"), ("depth_attention", "kimi_linear")}
CASES = [
    pytest.param(preset, backbone, marks=() if (preset, backbone) in QUICK else pytest.mark.slow)
    for backbone in ("qwen3_moe", "kimi_linear")
    for preset in PRESETS
]
END = 7


@pytest.fixture
def model(build: Any, preset: str, backbone: str) -> Decoder:
    return build(f"model={preset}", f"backbone={backbone}", *EXPERTS)


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 320, (2, 25), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def results(model: Decoder) -> list[Tensor]:
    """Return the loss with its penalty, the loads, and all gradients."""
    sums = model(*batch())
    loss = sums.total(0.1)
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [loss, sums.routing.load_e, *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize(("preset", "backbone"), CASES)
def test_tokens_depend_only_on_earlier_ones_also_with_a_cache(model: Decoder) -> None:
    model.requires_grad_(False)
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 320
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:9].max() < 1e-5
    assert difference[9:].min() > 1e-5
    cache = model.make_cache()
    pieces = [model(piece, cache=cache) for piece in tokens.split((4, 1, 16, 3), dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), rtol=1e-4, atol=1e-4)
    prompt = tokens[:, :7]
    assert torch.equal(generate(model, prompt, 4), generate(model, prompt, 4, use_cache=False))


@pytest.mark.parametrize(("preset", "backbone"), CASES)
def test_packed_documents_equal_single_documents_also_with_a_cache(model: Decoder) -> None:
    model.double().requires_grad_(False)
    tokens, masked = batch()[0].clamp(min=END + 1), copy.deepcopy(model)
    tokens[0, [4, 5, 16]], tokens[1, 0], masked.end_of_text = END, END, END
    rows = [row.tensor_split([i + 1 for i in (row == END).nonzero().flatten().tolist()]) for row in tokens]
    alone = torch.cat([torch.cat([model(one[None]) for one in row], dim=1) for row in rows])
    torch.testing.assert_close(masked(tokens), alone, rtol=1e-9, atol=1e-9)
    cache = masked.make_cache()
    pieces = [masked(piece, cache=cache) for piece in tokens.split((5, 1, 12, 6), dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("preset", "backbone"), CASES)
def test_recomputation_changes_nothing(model: Decoder, backbone: str) -> None:
    other = copy.deepcopy(model)
    other.activation_checkpointing = True if backbone == "qwen3_moe" else "selective"
    for one, two in zip(results(model), results(other), strict=True):
        assert torch.equal(one, two)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "backbone", "precision"),
    [("mhc", "qwen3_moe", "fp32"), ("dca", "kimi_linear", "bf16"), ("depth_attention", "kimi_linear", "fp32")],
)
def test_compile_changes_nothing(model: Decoder, precision: str) -> None:
    torch.compiler.reset()
    other = copy.deepcopy(model)
    compile_sublayers(other, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        expected, compiled = results(model), results(other)
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    torch.testing.assert_close(compiled[0], expected[0], rtol=tolerance, atol=0)
    if precision == "fp32":
        for one, two in zip(compiled, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
