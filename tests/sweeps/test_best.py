"""The choice of a value by the runs of a sweep, with losses that are known functions of the setting."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from depthlm.config import ConfigError, compose
from depthlm.config.names import by_name
from depthlm.runs.records import COMPLETE, DIVERGED, FAILED, WAITING, RunRecord
from depthlm.sweeps import Point, sweep_points
from depthlm.sweeps.best import find_undecided, undecided_text
from depthlm.training.nonfinite import DivergedError

Loss = Callable[[Mapping[str, str]], float | None]

LR = "optimizer.lr"
CHOICE = [f"experiment.best_over={LR}", "experiment.selection_seeds=[11,12]"]
GRID = [f"{LR}=1e-3,2e-3,4e-3", "seed=1,2", *CHOICE]
MINE = """# @package _global_
experiment:
  best_over: optimizer.lr
  selection_seeds: [7]
  points:
    - {label: Plain, model: vanilla, optimizer.lr: [0.001, 0.002], seed: [1, 2], paper: {loss: 2.5}}
    - {label: Wide, model: mhc, model.connection.num_streams: 2, optimizer.lr: [0.001, 0.002], seed: [1, 2]}
  columns:
    speed: {metric: speed, better: higher}
    loss: {metric: validation_loss}
"""


@pytest.fixture(autouse=True)
def _directories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the directory of a point be its overrides, from which `recorded` knows the settings."""
    monkeypatch.setattr(Point, "directory", property(lambda point: " ".join(point.overrides)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "experiment/mine").mkdir(parents=True)
    (tmp_path / "experiment/mine/it.yaml").write_text(MINE)
    return tmp_path


def record(state: str, failure: str | None = None, **summary: Any) -> RunRecord:
    return RunRecord(Path("x"), state, [], {"steps": 1} | summary if state == COMPLETE else {}, {}, failure)


def recorded(loss: Loss) -> Callable[[str], RunRecord]:
    """Return the reader of runs that are all complete with this loss; None: they diverged."""

    def read(directory: str) -> RunRecord:
        value = loss(by_name(directory.split()))
        if value is None:
            return record(FAILED, f"{DIVERGED}: 11 bad batches in a row")
        return record(COMPLETE, validation_loss=value)

    return read


def parabola(best: float, key: str = LR) -> Loss:
    """Return a loss that is a parabola over the logarithm of a setting; each seed adds a constant."""
    return lambda given: 3.0 + math.log(float(given[key]) / best) ** 2 + 0.1 * int(given["seed"])


def tried(points: list[Point], key: str = LR) -> list[float]:
    return list(dict.fromkeys(float(point.settings[key]) for point in points if point.selects))


def reported(points: list[Point], key: str = LR) -> list[tuple[str, float, str | None]]:
    return [(point.label, float(point.settings[key]), point.seed) for point in points if not point.selects]


@pytest.mark.parametrize(
    ("best", "values", "chosen"),
    [
        # inside the grid, which does not widen
        (2.2e-3, [1e-3, 2e-3, 4e-3], 2e-3),
        # at the edge by a little, so that one more value is enough
        (3.7e-3, [1e-3, 2e-3, 4e-3, 8e-3], 4e-3),
        # beyond the most values that a grid gains
        (1e-9, [1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3], 1.25e-4),
    ],
)
def test_the_best_value_is_chosen_and_the_grid_widens_at_its_edge(best, values, chosen):
    points = sweep_points(GRID, read=recorded(parabola(best)))
    assert tried(points) == values
    assert [point.seed for point in points if point.selects] == ["11", "12"] * len(values)
    assert reported(points) == [("vanilla", chosen, "1"), ("vanilla", chosen, "2")]
    assert len({point.directory for point in points}) == len(points)


def test_a_grid_of_whole_numbers_widens_by_whole_numbers():
    key = "training.batch_size"
    overrides = [f"{key}=512,1024", "seed=1", f"experiment.best_over={key}", "experiment.widen=1"]
    assert tried(sweep_points(overrides, read=recorded(parabola(1e9, key))), key) == [512, 1024, 2048]
    overrides[0] = f"{key}=24,32"
    assert tried(sweep_points(overrides, read=recorded(parabola(1e9, key))), key) == [24, 32, 43]
    overrides[0] = f"{key}=1,2"
    assert tried(sweep_points(overrides, read=recorded(parabola(1e-9, key))), key) == [1, 2]


def test_each_mechanism_has_a_value_of_its_own():
    best = {"vanilla": 1e-2, "mhc": 2e-3}
    points = sweep_points(
        ["model=vanilla,mhc", *GRID], read=recorded(lambda given: parabola(best[given["model"]])(given))
    )
    assert reported(points) == [
        ("vanilla", 8e-3, "1"), ("vanilla", 8e-3, "2"), ("mhc", 2e-3, "1"), ("mhc", 2e-3, "2"),
    ]  # fmt: skip
    labels = dict.fromkeys(point.label for point in points if point.selects)
    assert [*labels] == [f"vanilla, lr {lr}" for lr in ("1e-3", "2e-3", "4e-3", "8e-3", "0.016")] + [
        f"mhc, lr {lr}" for lr in ("1e-3", "2e-3", "4e-3")
    ]
    for point in points[-1:]:
        assert compose(point.overrides).optimizer.lr == float(point.settings[LR])


def test_the_seeds_of_the_choice_are_averaged_and_of_equal_values_the_smaller_one_is_chosen():
    losses = {(1e-3, "11"): 3.0, (1e-3, "12"): 4.0, (2e-3, "11"): 3.3, (2e-3, "12"): 3.3}
    grid = [f"{LR}=1e-3,2e-3", "seed=1", *CHOICE, "experiment.widen=0"]
    points = sweep_points(grid, read=recorded(lambda given: losses[float(given[LR]), given["seed"]]))
    assert reported(points) == [("vanilla", 2e-3, "1")]
    # a grid of equal values does not widen
    points = sweep_points([f"{LR}=4e-3,1e-3,2e-3", *CHOICE], read=recorded(lambda given: 3.0))
    assert tried(points) == [1e-3, 2e-3, 4e-3]
    assert reported(points) == [("vanilla", 1e-3, None)]


def test_a_run_that_diverged_decides_against_its_value():
    def diverging(given: Mapping[str, str]) -> float | None:
        # of one seed it diverges already at 4e-3
        limit = 3e-3 if given["seed"] == "12" else 6e-3
        return None if float(given[LR]) > limit else parabola(1.0)(given)

    points = sweep_points(GRID, read=recorded(diverging))
    assert reported(points)[0] == ("vanilla", 2e-3, "1")
    assert tried(points) == [1e-3, 2e-3, 4e-3]
    assert DivergedError.__name__ == DIVERGED
    # as does one with a loss that is not finite
    loss = lambda given: math.nan if float(given[LR]) > 3e-3 else parabola(1.0)(given)  # noqa: E731
    assert reported(sweep_points(GRID, read=recorded(loss)))[0] == ("vanilla", 2e-3, "1")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"damage": "x: validation_loss is not a number"}, "x: validation_loss is not a number"),
        ({"summary": {"steps": 1, "validation_loss": "3.1"}}, "no finite number to choose by"),
        (
            {"summary": {"steps": 1, "validation_loss": 9.0, "validation/a/loss": 9.0}},
            "validation set a is not the same in all of them",
        ),
    ],
)
def test_a_damaged_or_unlike_result_decides_nothing(change, reason):
    every = recorded(parabola(2e-3))

    def read(directory: str) -> RunRecord:
        run = every(directory)
        is_changed = f"{LR}=0.004" in directory and "seed=12" in directory
        return replace(run, **change) if is_changed else run

    points = sweep_points(GRID, read=read)
    assert reported(points) == []
    (group,) = find_undecided(points, read)
    assert group.waits == ("damage" in change)
    assert reason in undecided_text([group])


def test_an_evaluation_does_not_change_the_choice():
    every = recorded(parabola(2e-3))

    def read(directory: str) -> RunRecord:
        evaluation = {"step": 1, "validation_loss": 0.1, "validation/other/loss": 0.1}
        return replace(every(directory), evaluation=evaluation if f"{LR}=0.001" in directory else {})

    assert reported(sweep_points(GRID, read=read))[0] == ("vanilla", 2e-3, "1")


def test_without_any_finite_loss_the_grid_widens_downwards_and_nothing_is_chosen():
    read = recorded(lambda given: None)
    points = sweep_points(GRID, read=read)
    assert tried(points)[0] == 1.25e-4
    assert reported(points) == []
    (group,) = find_undecided(points, read)
    assert not group.waits
    assert "no finite number to choose by" in undecided_text([group])


@pytest.mark.parametrize("state", [WAITING, FAILED])
def test_a_group_chooses_once_all_of_its_runs_are_complete(state):
    every = recorded(parabola(2e-3))

    def read(directory: str) -> RunRecord:
        # a failure for another reason may succeed when it is repeated
        is_last = "model=mhc" in directory and f"{LR}=0.004" in directory and "seed=12" in directory
        return record(state, "OutOfMemoryError: 3 GiB") if is_last else every(directory)

    points = sweep_points(["model=vanilla,mhc", *GRID], read=read)
    assert reported(points) == [("vanilla", 2e-3, "1"), ("vanilla", 2e-3, "2")]
    assert undecided_text(find_undecided(points, read)) == "1 group without a chosen value yet: mhc (5 of 6 runs done)"


def test_the_choice_does_not_depend_on_the_order_in_which_runs_complete():
    every, done, draw = recorded(parabola(6e-3)), set[str](), random.Random(0)
    waiting = record(WAITING)
    points: list[Point] = []
    while True:
        known = sweep_points(GRID, read=lambda path: every(path) if path in done else waiting)
        # no point that was known is given up
        assert {point.directory for point in points} <= {point.directory for point in known}
        points = known
        if not (open_points := [point.directory for point in points if point.directory not in done]):
            break
        # the sweep is killed after any number of runs
        done.update(draw.sample(open_points, draw.randint(1, len(open_points))))
    assert [point.overrides for point in points] == [point.overrides for point in sweep_points(GRID, read=every)]


def test_a_value_that_the_configuration_refuses_is_not_added():
    grid = ["size.num_kv_heads=2,4", "experiment.best_over=size.num_kv_heads", CHOICE[1]]
    points = sweep_points(grid, read=recorded(lambda given: 1 / float(given["size.num_kv_heads"])))
    assert reported(points, "size.num_kv_heads") == [("vanilla", 4.0, None)]
    assert tried(points, "size.num_kv_heads") == [2, 4]


def test_an_experiment_chooses_by_its_first_column(folder):
    def read(directory: str) -> RunRecord:
        given = by_name(directory.split())
        return record(COMPLETE, validation_loss=1.0, speed=10 - abs(float(given[LR]) - 4e-3))

    points = sweep_points(["experiment=mine/it"], folder, read)
    assert tried(points) == [1e-3, 2e-3, 4e-3, 8e-3]
    assert reported(points) == [("Plain", 4e-3, "1"), ("Plain", 4e-3, "2"), ("Wide", 4e-3, "1"), ("Wide", 4e-3, "2")]
    assert [point.label for point in points][:4] == ["Plain, 0.001", "Plain, 0.002", "Plain, 4e-3", "Plain, 8e-3"]
    assert points[-3].paper == {"loss": 2.5}
    # without a run that has the column, the validation loss stands in
    points = sweep_points(["experiment=mine/it"], folder, recorded(parabola(2e-3)))
    assert {lr for _, lr, _ in reported(points)} == {2e-3}


def test_mistakes_are_reported():
    rates = f"{LR}=1e-3,2e-3"
    for overrides, words in (
        ([rates, CHOICE[0], "experiment.selection_seeds=[]"], ["needs experiment.selection_seeds"]),
        ([rates, "seed=1,11", *CHOICE], ["experiment.selection_seeds: 11 is also a seed that reports"]),
        (["model=vanilla,mhc", *CHOICE], [f"no points differ in {LR}", f"{LR}=1,2"]),
        (
            ["model=vanilla,mhc", "experiment.best_over=optimzer.lr", CHOICE[1]],
            ["no points differ in optimzer.lr", f"did you mean `{LR}`"],
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            sweep_points(overrides)
        assert all(word in str(caught.value) for word in words), caught.value


def test_a_point_without_the_chosen_setting_is_refused(folder):
    more = "    - {label: Plain, model: vanilla, seed: [1, 2]}\n  columns:"
    (folder / "experiment/mine/it.yaml").write_text(MINE.replace("  columns:", more, 1))
    with pytest.raises(ConfigError, match="some points do not set it; write its value in each of them"):
        sweep_points(["experiment=mine/it"], folder)


def test_points_that_start_from_another_point_have_no_choice(folder):
    text = MINE.replace("label: Wide, model: mhc", 'label: Wide, model: mhc, init_from: "@Plain, 0.001"')
    (folder / "experiment/mine/it.yaml").write_text(text)
    with pytest.raises(ConfigError, match="not with points that start from another point"):
        sweep_points(["experiment=mine/it"], folder)
