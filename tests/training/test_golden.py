"""The first 20 losses of every preset equal stored values; other tests compare with independent references."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from depthlm.config import mechanisms

from .synthetic import losses

GOLDEN = Path(__file__).parent / "golden"
# a residual stream, several streams, depth attention, sources read by every layer, and a read for each input
DIFFERENT = ["mhc", "moda", "attention_residuals", "dca"]


@pytest.fixture
def curve(small_run: Callable[..., list[str]]) -> Callable[..., list[float]]:
    """Return the first losses of a preset in four layers."""
    return lambda preset, steps, *overrides: losses(
        small_run(f"model={preset}", "size.num_layers=4", *overrides), steps
    )


@pytest.mark.parametrize("preset", mechanisms())
def test_the_golden_curve(preset: str, curve: Callable[..., list[float]], request: pytest.FixtureRequest) -> None:
    found = curve(preset, 20)
    assert found[-1] < found[0] - 0.5
    path = GOLDEN / f"{preset}.json"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    torch.testing.assert_close(found, json.loads(path.read_text()), rtol=1e-4, atol=0)


def pairs(stages: list[int], presets: list[str], quick: set[tuple[int, str]]) -> list[object]:
    """Return the pairs of a stage and a preset, slow except for the quick ones."""
    return [
        pytest.param(stage, preset, marks=() if (stage, preset) in quick else pytest.mark.slow)
        for stage in stages
        for preset in presets
    ]


@pytest.mark.parametrize(
    ("stage", "preset"),
    [
        *pairs([3], mechanisms(), {(3, "mhc"), (3, "moda")}),
        *pairs([1, 2], [*DIFFERENT, "hyper_connections", "vanilla"], {(1, "moda"), (2, "mhc")}),
    ],
)
def test_every_zero_stage_gives_the_same_curve(stage: int, preset: str, curve: Callable[..., list[float]]) -> None:
    expected = curve(preset, 4)
    torch.testing.assert_close(curve(preset, 4, f"deepspeed=zero{stage}"), expected, rtol=1e-5, atol=0)
