"""benchmarks/host.py: it times every phase without a GPU, and the page has its results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from depthlm.locations import REPOSITORY

pytest.importorskip("triton")
BENCHMARKS = REPOSITORY / "benchmarks"


def test_it_times_operators_and_decoders(tmp_path: Path) -> None:
    output = tmp_path / "host.json"
    settings = ["--rounds", "1", "--layers", "2", "--operators", "depth_attend_block", "merged_attention"]
    # in a process of its own, since the script replaces parts of Triton
    command = [sys.executable, "benchmarks/host.py", "--output", str(output), *settings, "--presets", "mhc"]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    results = json.loads(output.read_text())
    assert [*results["operators"]] == ["depth_attend_block", "merged_attention"]
    assert [*results["decoders"]["mhc"]] == ["forward", "backward", "token"]
    assert all(x > 0 for kind in ("operators", "decoders") for line in results[kind].values() for x in line.values())


def test_the_page_has_the_committed_results() -> None:
    command = [sys.executable, "benchmarks/host.py", "--markdown", "benchmarks/results/host-xeon-2-cores.json"]
    table = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert table in (BENCHMARKS / "README.md").read_text()
