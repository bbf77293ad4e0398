"""A quarter of an hour on a GPU: limits, failures and interruptions of rungs, tables of the README, and a rehearsal."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.rungs.runs import TESTS
from depthlm.locations import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
README = BENCHMARKS / "README.md"
MACHINE = {"device": "NVIDIA H100 80GB HBM3", "threads": 16, "python": "3.12.1",
           "versions": {"torch": "2.11.0", "triton": "3.6.0", "deepspeed": "0.19.8"}}  # fmt: skip
# writes partial results, as the scripts do
BEGIN = (
    "import json, pathlib, sys, time\npathlib.Path(sys.argv[-1]).write_text(json.dumps({'lines': sys.argv[1:-2]}))\n"
)


@pytest.fixture
def rung(tmp_path: Path) -> Callable[..., Any]:
    """Make a rung from the source of its script, which begins with partial results."""

    def make(name: str, source: str = "", minutes: float = 1.0, arguments: str = "full", part: int = 2) -> Any:
        script = tmp_path / f"{name}.py"
        script.write_text(BEGIN + source)
        return gpu.Rung(name, f"what {name} is", part, minutes, str(script), arguments, "tiny")

    return make


def written(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


def after(minutes: float = 10) -> float:
    return time.monotonic() + 60 * minutes


def test_a_rung_that_fails_records_its_error_and_the_next_one_runs(rung, tmp_path):
    rungs = [rung("broken", "raise RuntimeError('no memory')"), rung("sound")]
    assert gpu.climb(rungs, tmp_path, after(), rehearse=False) == (["broken"], None)
    broken, sound = written(tmp_path, "broken"), written(tmp_path, "sound")
    assert broken["rung"]["status"] == "failed with exit status 1"
    assert broken["rung"]["error"].endswith("RuntimeError: no memory")
    assert broken["lines"] == sound["lines"] == ["full"]
    assert sound["rung"]["status"] == "passed"
    assert "error" not in sound["rung"]


def test_a_rung_that_does_not_fit_into_the_time_left_is_not_started(rung, tmp_path):
    # the first one would otherwise never run where a machine is lent for a shorter time
    rungs = [rung("first", minutes=9), rung("second", minutes=1.5), rung("third", minutes=3), rung("fourth", minutes=0)]
    assert gpu.climb(rungs, tmp_path, after(1), rehearse=False) == ([], "third")
    assert {path.stem for path in tmp_path.glob("*.json")} == {"first", "second"}


def test_rungs_run_side_by_side_and_are_stopped_at_their_limits_with_their_processes(rung, tmp_path):
    # each waits for the other one
    source = (
        "here = pathlib.Path(__file__)\nhere.with_suffix('.here').touch()\n"
        "while len(list(here.parent.glob('*.here'))) < 2: time.sleep(0.01)"
    )
    rungs = [rung("first", source, part=1), rung("second", source, part=1)]
    marker = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(1.5); pathlib.Path({str(marker)!r}).touch()"
    source = f"import subprocess\nsubprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(60)"
    slow = rung("slow", source, minutes=1 / 60, part=1)
    assert gpu.climb([*rungs, slow], tmp_path, after(0.2), rehearse=False) == (["slow"], None)
    assert [written(tmp_path, name)["rung"]["status"] for name in ("first", "second")] == ["passed", "passed"]
    assert "limit" in written(tmp_path, "slow")["rung"]["status"]
    assert written(tmp_path, "slow")["lines"] == ["full"]
    time.sleep(1.0)
    assert not marker.exists()


def test_the_parts_fit_into_a_quarter_of_an_hour_and_the_readme_lists_the_rungs():
    assert len(gpu.PARTS) * gpu.MINUTES <= 15
    # nothing after it is started before the mechanisms are measured
    assert sum(rung.minutes for rung in gpu.RUNGS if rung.name in ("device", "mechanisms", "presets")) < gpu.MINUTES
    assert {rung.minutes for rung in gpu.RUNGS if rung.part == gpu.SIDE_BY_SIDE} == {gpu.MINUTES}
    assert [rung.part for rung in gpu.RUNGS] == sorted(rung.part for rung in gpu.RUNGS)
    section = README.read_text().partition("## A quarter of an hour on a GPU")[2].partition("<!-- gpu")[0]
    listed = re.findall(r"^\| `(\w+)` \| (\d) \| ([\d.]+) \|", section, re.MULTILINE)
    assert listed == [(rung.name, str(rung.part), f"{rung.minutes:g}") for rung in gpu.RUNGS]
    assert len(gpu.MARKED.findall(README.read_text())) == 1


def test_the_tests_that_run_on_a_gpu_exist():
    for name in TESTS:
        path, _, test = name.partition("::")
        assert (REPOSITORY / path).exists()
        assert not test or f"def {test}(" in (REPOSITORY / path).read_text()


LINE = {"preset": "vanilla", "size": "1.5b", "mode": "eager", "micro_batch_size": 8, "sequence_length": 2048}


def test_tables_are_written_from_the_results_of_each_device():
    measured = {"tokens_per_second": 51234.5, "microseconds_per_token": 19.52, "mfu": 0.4567, "launches": 5723,
                "gpu_seconds": 0.3125, "peak_memory_gib": 52.04, "estimated_memory_gib": 52.34,
                "first_step_seconds": 3.21}  # fmt: skip
    failed = {**LINE, "mode": "compiled", "error": "OutOfMemoryError: 80 GiB"}
    passed = {"machine": MACHINE, "rung": {"status": "passed", "seconds": 61.2}, "lines": [LINE | measured, failed]}
    broken = {"rung": {"status": "failed with exit status 1", "seconds": 9.0, "error": "no disk"}}
    empty = f"before\n<!-- gpu -->\n{gpu.NOTHING}\n<!-- end -->\nafter\n"
    devices = {"gpu-h100": {"vanilla": passed, "resume": broken}}
    filled, errors = gpu.fill(empty, devices)
    assert not errors
    assert "| vanilla | 1.5b | eager | 8 x 2048 | 51,234 | 19.5 | 45.7% | 5,723 | 0.312 | 52.0 | 52.3 | 3.2 |" in filled
    assert "| vanilla | 1.5b | compiled | 8 x 2048 | error |" in filled
    assert "| resume | failed with exit status 1 | 9 |" in filled
    # writing them again changes nothing
    assert gpu.fill(filled, devices) == (filled, [])


def test_the_committed_results_still_make_tables():
    folder = REPOSITORY / "benchmarks/results/gpu-nvidia-h200"
    read = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    text, errors = gpu.fill("<!-- gpu -->\n<!-- end -->\n", {folder.name: read})
    assert not errors
    assert all(f"`{name}`, " in text for name in read)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["device"], marks=pytest.mark.slow),
        pytest.param([rung.name for rung in gpu.RUNGS], marks=pytest.mark.release),
    ],
    ids=["one", "all"],
)
def test_a_rehearsal_runs_rungs_to_the_end(names, tmp_path):
    pytest.importorskip("triton")
    command = [sys.executable, "benchmarks/gpu.py", "--rehearse", "--output", str(tmp_path), "--only", *names]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    rungs = [rung for rung in gpu.RUNGS if rung.name in names]
    for rung in rungs:
        results = written(tmp_path / "gpu-rehearsal", rung.name)
        if rung.lacks() is None:
            assert results["rung"]["status"] == "passed", results["rung"]
            assert "machine" in results, rung.name
        else:
            assert results["rung"] == {"status": "skipped", "error": rung.lacks()}
    filled = (tmp_path / "README.md").read_text()
    shown = [rung for rung in rungs if f"`{rung.name}`, {rung.question}." in filled]
    assert shown == [rung for rung in rungs if not rung.lacks()]
    assert not list((REPOSITORY / "outputs").glob("gpu-*"))
