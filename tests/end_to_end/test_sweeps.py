"""Sweeps from the command line: finished points are skipped, interrupted ones resume, failed ones run again."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from depthlm.locations import REPOSITORY
from depthlm.runs.records import read_metrics

from ..forks import Forks, environment_with

TRAIN = [str(REPOSITORY / "train.py")]
FRAGILE = """from pathlib import Path
from depthlm.mechanisms.residual import Residual

class Fragile(Residual):
    def read(self, stream):
        if not (Path(__file__).parent / "fixed").exists():
            raise ZeroDivisionError("on purpose")
        return super().read(stream)

class Plain(Residual):
    pass
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


def kept(overrides: list[str]) -> list[str]:
    """Return the overrides without the directory, so that each point has its own."""
    return [text for text in overrides if not text.startswith(("output_dir=", "seed="))]


@pytest.fixture
def run(tmp_path: Path, forks: Forks) -> Run:
    """Run a command in the test's folder, whose modules it can import."""
    environment = environment_with(PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    return lambda *command: forks.run(command, cwd=tmp_path, timeout=600, environment=environment)


@pytest.mark.slow
def test_repeating_a_sweep_skips_resumes_and_repeats_points(small_run, tmp_path, run):
    (tmp_path / "fragile.py").write_text(FRAGILE)
    place = f"output_dir={tmp_path}/runs/${{model.connection._target_}}"
    names = ["fragile.Plain", "fragile.Fragile", "depthlm.mechanisms.residual.Residual"]
    # one point is stopped between two checkpoints, by a separate command
    part = run(*TRAIN, *kept(small_run()), place, f"model.connection._target_={names[2]}", "training.stop_after=10")
    assert part.returncode == 0, part.stderr
    sweep = [*TRAIN, "-m", *kept(small_run()), place, f"model.connection._target_={','.join(names)}"]
    first = run(*sweep)
    assert first.returncode == 1
    assert "ZeroDivisionError: on purpose" in first.stdout
    assert "3 points: 2 complete, 1 failed" in first.stdout
    assert "step-00000010" in first.stdout
    finished = {name: (tmp_path / "runs" / name / "summary.json").stat().st_mtime_ns for name in (names[0], names[2])}
    whole, resumed = (
        [row["loss"] for row in read_metrics(tmp_path / "runs" / name / "metrics.jsonl")]
        for name in (names[0], names[2])
    )
    assert resumed == whole
    (tmp_path / "fixed").touch()
    second = run(*sweep)
    assert second.returncode == 0, second.stderr
    assert "3 points: 3 complete" in second.stdout
    assert not (tmp_path / "runs" / names[1] / "failure.json").exists()
    assert finished == {name: (tmp_path / "runs" / name / "summary.json").stat().st_mtime_ns for name in finished}


@pytest.mark.slow
def test_optuna_tunes_the_learning_rate_and_resumes_its_study(small_run, tmp_path, run):
    pytest.importorskip("optuna")
    command = [*TRAIN, "-m", "hydra/sweeper=learning_rate", "model=mhc", "hydra.sweeper.n_trials=2",
               *kept(small_run("training.max_steps=4"))]  # fmt: skip
    for trials in (2, 4):
        done = run(*command)
        assert done.returncode == 0, done.stderr
        runs = list((tmp_path / "outputs/default").glob("*/summary.json"))
        assert len(runs) == trials
    losses = {float(yaml.safe_load(path.read_text())["validation_loss"]) for path in runs}
    assert f"4 trials; the best loss is {min(losses):.4f} with optimizer.lr=" in done.stdout


@pytest.mark.slow
def test_an_experiment_with_the_smoke_budget_gives_the_papers_table(tmp_path, run):
    line = ["experiment=dca/related_work", "budget=smoke", "tracker=none"]
    done = run(*TRAIN, "-m", *line)
    assert done.returncode == 0, done.stderr
    assert "5 points: 5 complete" in done.stdout
    reported = run("-m", "depthlm", "report", *line)
    assert reported.returncode == 0, reported.stderr
    (path,) = (tmp_path / "outputs/dca/related_work").glob("report-*/report.md")
    report = path.read_text()
    assert "5 runs: 5 complete" in report
    assert "18.65" in report
    assert "not comparable" in report
