"""A study that is opened again resumes, a run that diverged does not end it, and mistakes end with exit code 2."""

import math
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from hydra_plugins.optuna_sweeper import OptunaSweeper

from .launcher import Launcher

optuna = pytest.importorskip("optuna")
OPTIONS: dict[str, Any] = {
    "sampler": {"_target_": "optuna.samplers.RandomSampler", "seed": 0},
    "storage": "sqlite:///studies.db",
    "study_name": None,
    "direction": "minimize",
    "n_trials": 4,
    "n_jobs": 1,
    "max_failure_rate": 0.0,
    "params": {"optimizer.lr": "tag(log, interval(1e-4, 1e-2))"},
}


def sweep(launcher: Any, *overrides: str, **options: Any) -> int | str | None:
    """Return what a sweep exits with."""
    sweeper = OptunaSweeper(**OPTIONS | options)
    sweeper.config_dir, sweeper.launcher = None, launcher
    sweeper.parser = OverridesParser.create()
    try:
        sweeper.sweep(["size=micro", *overrides])
    except SystemExit as exit:
        return exit.code
    return 0


def states() -> list[str]:
    (study,) = optuna.get_all_study_names(OPTIONS["storage"])
    return [trial.state.name for trial in optuna.load_study(study_name=study, storage=OPTIONS["storage"]).trials]


def distance(rate: float) -> float:
    return abs(math.log(rate / 1e-3))


def test_the_same_command_adds_trials_and_keeps_the_best(capsys):
    first, second = Launcher(distance), Launcher(distance)
    assert (sweep(first), sweep(second)) == (0, 0)
    rates = first.rates + second.rates
    assert len({*rates}) == 8
    best = min(rates, key=distance)
    assert f"8 trials; the best loss is {distance(best):.4f} with optimizer.lr={best}" in capsys.readouterr().out


def test_the_point_of_an_experiment_is_tuned_and_only_one(capsys):
    launcher, given = Launcher(distance), ["experiment=depthlm/scaling", "size=nano_60k", "seed=1"]
    assert sweep(launcher, *given, "model=mhc", n_trials=1) == 0
    assert launcher.launched[0][0].items() >= {"training.max_steps": "184", "size": "nano_60k", "model": "mhc"}.items()
    chooses = ["experiment=depthlm/sizes", "size=nano_60k", "model=mudd", "seed=1"]
    assert sweep(launcher, *chooses, study_name="other", n_trials=1) == 0
    assert launcher.launched[1][0].items() >= {"seed": "1", "training.max_steps": "184"}.items()
    assert sweep(launcher, *given) == 2
    assert "9 points; tune one, as in training.max_steps=184 model=vanilla" in capsys.readouterr().err


def test_a_trial_that_was_interrupted_comes_first():
    killed, again = Launcher(distance, limit=2), Launcher(distance)
    with pytest.raises(KeyboardInterrupt):
        sweep(killed)
    assert states() == ["COMPLETE", "COMPLETE", "RUNNING"]
    assert sweep(again) == 0
    assert again.rates[0] == killed.rates[-1]
    assert states() == ["COMPLETE"] * 6


def test_a_run_that_diverged_is_pruned_and_not_repeated():
    launcher = Launcher(lambda rate: "DivergedError: 11 bad batches in a row" if rate > 1e-3 else rate)
    axis = "optimizer.lr=1e-4,1e-2"
    assert sweep(launcher, axis, n_trials=8, n_jobs=8) == 0
    # of the trials with one value, a batch trains one run
    assert sorted(launcher.rates) == [1e-4, 1e-2]
    assert {*states()} == {"COMPLETE", "PRUNED"}
    again = Launcher(distance)
    assert sweep(again, axis, n_trials=8, n_jobs=8) == 0
    assert again.rates == [1e-4]


def test_runs_that_failed_end_the_sweep_and_without_a_finite_loss_there_is_no_best_trial():
    assert "train.py: " in str(sweep(Launcher(lambda _: "ZeroDivisionError: on purpose")))
    assert states() == ["FAIL"]
    assert "no trial has a finite loss" in str(sweep(Launcher(lambda rate: "DivergedError: inf")))


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("tag(log,interval(1e-4,1e-2))", "FloatDistribution(high=0.01, log=True, low=0.0001, step=None)"),
        ("int(interval(2,8))", "IntDistribution(high=8, log=False, low=2, step=1)"),
        # as in every sweep, the end of a range is not in it
        ("range(0.25,1.1,0.25)", "FloatDistribution(high=1.0, log=False, low=0.25, step=0.25)"),
        ("shuffle(range(1,3))", None),
        ("1e-3,[1,2],a b,true", "CategoricalDistribution(choices=(0.001, '[1,2]', 'a b', True))"),
    ],
)
def test_what_is_tuned_is_written_as_in_every_sweep(axis, expected):
    from hydra_plugins.optuna_sweeper import _distribution

    distribution = _distribution(OverridesParser.create().parse_override(f"key={axis}"))
    assert str(distribution) == expected if expected else {*distribution.choices} == {1, 2}


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (["optimizer.lrr=interval(0,1)"], {}, "no such key; did you mean `optimizer.lr`?"),
        (["optimizer.lr=interval(2,1)"], {}, "low <= high"),
        (["optimizer.lr=1e-3"], {}, "nothing to tune; add an interval"),
        (["name=mine"], {}, "output_dir=outputs/default/mine: all trials would write there; interpolate"),
        (["dry_run=true"], {}, "a dry run has no loss to tune by"),
        ([], {"n_trials": 0}, "hydra.sweeper.n_trials=0: must be an integer, at least 1"),
        ([], {"direction": "down"}, "hydra.sweeper.direction=down: must be one of minimize, maximize"),
        ([], {"storage": "sqlite:////no/such/folder/studies.db"}, "unable to open database file"),
        ([], {"sampler": {"_target_": "optuna.samplers.Tpe"}}, "optuna.samplers.Tpe"),
    ],
)
def test_a_mistake_ends_with_2(overrides, options, message, capsys):
    launcher = Launcher(distance)
    assert sweep(launcher, *overrides, **options) == 2
    assert message in capsys.readouterr().err
    assert not launcher.launched


def test_other_choices_need_another_study_and_all_need_optuna(monkeypatch, capsys):
    assert sweep(Launcher(distance), "optimizer.lr=1e-3,2e-3") == 0
    assert sweep(Launcher(distance), "optimizer.lr=1e-3,4e-3") == 2
    assert "give another hydra.sweeper.study_name=" in capsys.readouterr().err
    # without Optuna
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert sweep(Launcher(distance)) == 2
    assert "hydra/sweeper=optuna: not installed; pip install" in capsys.readouterr().err
