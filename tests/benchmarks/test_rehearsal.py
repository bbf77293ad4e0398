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

# GiB saved for the backward pass by half of the layers of size 1.5b, micro-batch 8 x 2048, fp32 weights under autocast
SAVED_GIB = {
    "vanilla": 24,
    "depth_attention": 24,
    "moda": 26,
    "attention_residuals": 28,
    "attention_residuals_full": 31,
    "dca": 29,
    "denseformer": 27,
    "mhc": 32,
    "hyper_connections": 32,
}


def rehearsed(folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """Return the results of each preset."""
    command = [sys.executable, "benchmarks/rehearsal.py", "--output", str(folder / "rehearsal.json"), *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {line["preset"]: line for line in json.loads((folder / "rehearsal.json").read_text())["lines"]}


def test_a_step_of_each_preset_stays_within_its_memory_and_the_estimate_equals_it(tmp_path: Path) -> None:
    lines = rehearsed(tmp_path, "size.num_layers=24")
    for preset, line in lines.items():
        assert line["saved_gib"] < SAVED_GIB[preset], preset
        assert line["estimated_saved_gib"] == pytest.approx(line["saved_gib"], rel=0.03), preset
        assert line["estimated_peak_gib"] == pytest.approx(line["peak_gib"], rel=0.03), preset
        assert not line["host_synchronizations"], preset
        assert not line["parameters_without_gradient"], preset
        # beyond those of the head
        assert line["compilations"] - lines["vanilla"]["compilations"] <= 8, preset
        # the gradients of sources and of depth entries are summed in the kernels
        assert line["gradient_sums"] <= lines["vanilla"]["gradient_sums"] + 150, preset


@pytest.mark.parametrize(("precision", "presets"), [("autocast", "moda,dca"), ("bf16", "vanilla,mhc")])
def test_the_estimate_holds_with_activation_checkpointing(precision: str, presets: str, tmp_path: Path) -> None:
    small = ["size.num_layers=6", "training.activation_checkpointing=true"]
    for preset, line in rehearsed(tmp_path, "--precision", precision, "--presets", presets, *small).items():
        assert line["estimated_peak_gib"] == pytest.approx(line["peak_gib"], rel=0.03), preset


def test_no_kernel_spills_registers(tmp_path: Path) -> None:
    """Neither the number of layers nor the micro-batch affects the machine code."""
    fused = "depth_attention,moda,attention_residuals,dca,denseformer,mhc"
    lines = rehearsed(tmp_path, "--code", "--presets", fused, "--micro-batch", "2", "size.num_layers=6")
    for preset, line in lines.items():
        assert line["machine_code"]
        for version in line["machine_code"]:
            where = preset, version["kernel"], version["arguments"]
            assert version["stack"] == version["spill_loads"] == 0, where
            assert version["blocks_per_sm"] >= 2, where


def test_compiled_sublayers_launch_few_kernels(tmp_path: Path) -> None:
    line = rehearsed(tmp_path, "--compile", "--presets", "vanilla", "size.num_layers=24")["vanilla"]
    assert line["launches"] <= 1250
    # less than without torch.compile, which the estimate before a run assumes
    assert line["saved_gib"] < 15


def test_mistakes_are_reported_and_other_presets_continue(tmp_path: Path) -> None:
    output = tmp_path / "rehearsal.json"
    arguments = ["--presets", "nonsense,vanilla", "--output", str(output), "size.num_layers=2"]
    command = [sys.executable, "benchmarks/rehearsal.py", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    assert "nonsense" in done.stderr
    (line,) = json.loads(output.read_text())["lines"]
    assert line["preset"] == "vanilla"
    shown = subprocess.run([*command[:2], "--markdown", str(output)], cwd=REPOSITORY, capture_output=True, text=True)
    assert f"| vanilla | 1.5b | {line['launches']:,} |" in shown.stdout
