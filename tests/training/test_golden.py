"""The first 20 losses of every preset equal stored values; other tests compare with independent references."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from depthlm.config import mechanisms

from .test_numbers import losses

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("preset", mechanisms())
def test_the_golden_curve(preset: str, small_run: Callable[..., list[str]], request: pytest.FixtureRequest) -> None:
    curve = losses(small_run(f"model={preset}", "size.num_layers=4"), 20)
    assert curve[-1] < curve[0] - 0.5
    path = GOLDEN / f"{preset}.json"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(curve, indent=1) + "\n")
    torch.testing.assert_close(curve, json.loads(path.read_text()), rtol=1e-4, atol=0)


@pytest.mark.parametrize("preset", mechanisms())
def test_zero_3_gives_the_same_curve(preset: str, small_run: Callable[..., list[str]]) -> None:
    overrides = small_run(f"model={preset}", "size.num_layers=4")
    expected = losses(overrides, 4)
    torch.testing.assert_close(losses([*overrides, "deepspeed=zero3"], 4), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("preset", ["mhc", "moda", "dca", "attention_residuals", "hyper_connections"])
def test_zero_1_and_2_give_the_same_curve(preset: str, stage: int, small_run: Callable[..., list[str]]) -> None:
    overrides = small_run(f"model={preset}", "size.num_layers=4")
    expected = losses(overrides, 4)
    torch.testing.assert_close(losses([*overrides, f"deepspeed=zero{stage}"], 4), expected, rtol=1e-5, atol=0)
