"""`train.py -m` launches the points that the results of earlier ones call for."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus

from depthlm.config.saved import config_text
from depthlm.sweeps import Point
from hydra_plugins.points_sweeper import PointsSweeper

from ..report.made_up import write_run
from .launcher import Launcher

SWEEP = ["optimizer.lr=1e-3,2e-3", "seed=1", "experiment.best_over=optimizer.lr", "experiment.selection_seeds=[11]"]


def sweep(launcher: Any, *overrides: str) -> int:
    """Return the exit code of a sweep."""
    sweeper = PointsSweeper()
    sweeper.config_dir, sweeper.launcher = None, launcher
    try:
        sweeper.sweep([*SWEEP, *overrides])
    except SystemExit as exit:
        return int(str(exit.code))
    return 0


def loss(rate: float) -> float | str:
    return "DivergedError: 11 bad batches in a row" if rate > 5e-3 else 3.0 + math.log(rate / 1e-2) ** 2


ROUNDS = [[("1e-3", "11"), ("2e-3", "11")], [("4e-3", "11")], [("8e-3", "11")], [("4e-3", "1")]]


def rounds(launcher: Launcher) -> list[list[tuple[str, str]]]:
    names = {"0.001": "1e-3", "0.002": "2e-3"}
    return [
        [(names.get(given["optimizer.lr"], given["optimizer.lr"]), given["seed"]) for given in of_round]
        for of_round in launcher.launched
    ]


def test_each_round_launches_what_the_runs_before_it_call_for(capsys):
    launcher = Launcher(loss)
    assert sweep(launcher) == 0
    assert rounds(launcher) == ROUNDS
    printed = capsys.readouterr().out
    assert "5 points: 4 complete, 1 failed" in printed
    assert "8e-3: diverged" in printed
    # the run that diverged has decided, and is not repeated
    again = Launcher(loss)
    assert sweep(again) == 0
    assert rounds(again) == [[*ROUNDS[0], *ROUNDS[1], *ROUNDS[3]]]


def test_a_sweep_that_is_killed_ends_with_the_same_choice():
    with pytest.raises(KeyboardInterrupt):
        sweep(Launcher(loss, limit=3))
    launcher = Launcher(loss)
    assert sweep(launcher) == 0
    assert rounds(launcher)[-1] == ROUNDS[-1]


def test_a_dry_run_ends(capsys):
    launcher = Launcher(loss)
    assert sweep(launcher, "dry_run=true") == 0
    assert rounds(launcher) == ROUNDS[:1]
    assert "1 group without a chosen value yet" in " ".join(capsys.readouterr().out.split())


def test_a_sweep_without_a_finite_loss_or_with_a_run_that_failed_fails():
    assert sweep(Launcher(lambda rate: "DivergedError: inf"), "experiment.widen=0") == 1
    failing = SimpleNamespace(
        launch=lambda job_overrides, initial_job_idx: [
            JobReturn(status=JobStatus.COMPLETED, _return_value=math.inf) for _ in job_overrides
        ]
    )
    assert sweep(failing) == 1


def test_a_run_that_another_sweep_has_trained_meanwhile_does_not_fail_this_one(capsys):
    def launch(job_overrides: Any, initial_job_idx: int) -> list[JobReturn]:
        for overrides in job_overrides:
            point = Point(overrides)
            (write_run(point.directory, 3.0) / "config.yaml").write_text(config_text(point.config))
        return [JobReturn(status=JobStatus.COMPLETED, _return_value=math.inf) for _ in job_overrides]

    sweeper = PointsSweeper()
    sweeper.config_dir, sweeper.launcher = None, SimpleNamespace(launch=launch)  # type: ignore[assignment]
    sweeper.sweep(["seed=1,2", "optimizer.lr=2e-3"])
    assert "2 points: 2 complete" in capsys.readouterr().out


def test_hydra_accepts_the_new_names_of_a_point():
    launched: list[Any] = []

    def launch(job_overrides: Any, initial_job_idx: int) -> list[JobReturn]:
        launched.extend(job_overrides)
        return [JobReturn(status=JobStatus.COMPLETED, _return_value=1.0) for _ in job_overrides]

    sweeper = PointsSweeper()
    sweeper.config_dir, sweeper.launcher = None, SimpleNamespace(launch=launch)  # type: ignore[assignment]
    sweeper.sweep(["data.validation.wiki.source=texts", "seed=1"])
    assert launched == [["++data.validation.wiki.source=texts", "seed=1"]]
