"""`train.py run=<directory>`: a run resumed, extended and varied from the command line."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from depthlm.runs.records import COMPLETE, read_run

from ..forks import Forks


def losses(directory: Path) -> list[float]:
    return [row["loss"] for row in read_run(directory).rows]


@pytest.mark.slow
def test_a_run_is_recognised_as_complete_then_extended_and_varied(
    small_run: Callable[..., list[str]], tmp_path: Path, forks: Forks
) -> None:
    def train(*arguments: str) -> subprocess.CompletedProcess[str]:
        return forks.run(["train.py", *arguments])

    base, six = tmp_path / "mine", "training.max_steps=6"
    assert train(*small_run(six, name="mine")).returncode == 0
    before = losses(base)

    again = train(f"run={base}")
    assert again.returncode == 0, again.stderr
    assert "complete" in again.stdout + again.stderr
    assert losses(base) == before

    longer = train(f"run={base}", "training.max_steps=8", "resume=extend")
    assert longer.returncode == 0, longer.stderr
    assert (read_run(base).state, len(losses(base)), losses(base)[:6]) == (COMPLETE, 8, before)

    varied = train(f"run={base}", "optimizer.lr=0.01", six)
    assert varied.returncode == 0, varied.stderr
    beside = tmp_path / "mine-lr0.01-max_steps6"
    assert f"a new run, from scratch, in {beside}" in varied.stdout
    assert "optimizer.lr: the run has" in varied.stdout
    assert train(*small_run(six, "optimizer.lr=0.01", name="spelled_out")).returncode == 0
    assert losses(beside) == losses(tmp_path / "spelled_out")
    assert losses(beside) != before

    swept = train("-m", f"run={base}", "seed=1,2")
    assert (swept.returncode, "Traceback" in swept.stderr) == (2, False)
    assert "run=: resumes or varies one run" in swept.stderr
