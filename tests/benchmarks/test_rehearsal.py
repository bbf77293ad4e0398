"""What a training step requires of a GPU stays within bounds, and the memory estimate equals it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from depthlm.locations import REPOSITORY

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("c++"), reason="the fake GPU needs a C++ compiler"),
]

# GiB saved for the backward pass at size 1.5b, micro-batch 8 x 2048, fp32 weights under autocast
SAVED_GIB = {
    "vanilla": 48,
    "depth_attention": 48,
    "moda": 52,
    "attention_residuals": 56,
    "attention_residuals_full": 73,
    "dca": 58,
    "denseformer": 54,
    "mhc": 64,
    "hyper_connections": 64,
}


def rehearsed(folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """Return the results of each preset."""
    command = [sys.executable, "benchmarks/rehearsal.py", "--output", str(folder / "rehearsal.json"), *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {line["preset"]: line for line in json.loads((folder / "rehearsal.json").read_text())["lines"]}


def test_a_step_of_each_preset_stays_within_its_memory_and_the_estimate_equals_it(tmp_path: Path) -> None:
    for preset, line in rehearsed(tmp_path).items():
        assert line["saved_gib"] < SAVED_GIB[preset], preset
        assert line["estimated_saved_gib"] == pytest.approx(line["saved_gib"], rel=0.03), preset
        assert line["estimated_peak_gib"] == pytest.approx(line["peak_gib"], rel=0.03), preset
        assert not line["host_synchronizations"], preset
        assert not line["parameters_without_gradient"], preset


@pytest.mark.parametrize("precision", ["autocast", "bf16"])
def test_the_estimate_holds_with_activation_checkpointing(precision: str, tmp_path: Path) -> None:
    small = ["size.num_layers=12", "training.activation_checkpointing=true"]
    for preset, line in rehearsed(tmp_path, "--precision", precision, *small).items():
        assert line["estimated_peak_gib"] == pytest.approx(line["peak_gib"], rel=0.03), preset


def test_compiled_sublayers_launch_few_kernels(tmp_path: Path) -> None:
    plain, compiled = (rehearsed(tmp_path, "--presets", "vanilla", *flags)["vanilla"] for flags in ([], ["--compile"]))
    assert plain["launches"] <= 5000
    assert compiled["launches"] <= 3100
    assert compiled["saved_gib"] < 48


def test_mistakes_are_reported_and_other_presets_continue(tmp_path: Path) -> None:
    output = tmp_path / "rehearsal.json"
    arguments = ["--presets", "nonsense", "vanilla", "--output", str(output), "size.num_layers=2"]
    command = [sys.executable, "benchmarks/rehearsal.py", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    assert "nonsense" in done.stderr
    assert [line["preset"] for line in json.loads(output.read_text())["lines"]] == ["vanilla"]
