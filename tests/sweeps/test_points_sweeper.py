"""`train.py -m` launches the points that the results of earlier ones call for."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus

from hydra_plugins.points_sweeper import PointsSweeper

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
