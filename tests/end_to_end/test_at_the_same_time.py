"""Commands that run at the same time: runs that need the same token files, and reports of a sweep that is training."""

import fcntl
from pathlib import Path

import pytest

from depthlm.report import report
from depthlm.runs.listing import list_runs
from depthlm.runs.records import COMPLETE, RUNNING

from ..forks import Forked
from ..pictures import quick_pictures
from ..training.run_files import losses

__all__ = ["quick_pictures"]


@pytest.mark.slow
def test_two_runs_that_need_the_same_unprepared_tokens_train_as_if_alone(small_run, tmp_path, forks):
    def start(tokens: str, name: str) -> Forked:
        overrides = small_run("training.max_steps=3", f"data.path={tmp_path}/{tokens}", name=name)
        return forks.start(["train.py", *overrides])

    with (tmp_path / ".shared.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runs = [start("shared", name) for name in ("one", "other")]
        for run in runs:
            assert run.stdout is not None
            assert any("waiting for the process that prepares" in line for line in run.stdout)
    outputs = [run.communicate(120)[0] for run in runs]
    assert sum(f"prepared {tmp_path}/shared" in output for output in outputs) == 1
    assert start("own", "alone").wait(120) == 0
    assert len(losses(tmp_path / "alone")) == 3
    assert losses(tmp_path / "one") == losses(tmp_path / "other") == losses(tmp_path / "alone")


@pytest.mark.slow
def test_a_sweep_that_is_training_is_listed_and_reported(small_run, tmp_path, forks, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = small_run("training.max_steps=20", "training.checkpoint_every=5", "seed=1,2",
                          f"output_dir={tmp_path}/runs/seed-${{seed}}")  # fmt: skip
    sweep = forks.start(["train.py", "-m", *overrides])
    seen, tables = [], []
    while sweep.poll() is None or not tables:
        if runs := list_runs(tmp_path / "runs") if (tmp_path / "runs").exists() else []:
            seen.append({Path(run.directory).name: run.state for run in runs})
            tables.append(report(["runs", "to=report"]).read_text())
    assert sweep.wait() == 0
    assert any(state.get("seed-1") == RUNNING for state in seen)
    assert any(state == {"seed-1": COMPLETE, "seed-2": RUNNING} for state in seen)
    assert any("1 complete, 1 running" in table for table in tables)
    assert len(losses(tmp_path / "runs/seed-2")) == 20
