"""The points that form a row, their numbers, and the row with which each is compared."""

import math
from pathlib import Path

import numpy as np
import pytest

from depthlm.config.experiment import Column, Experiment
from depthlm.report.rows import (
    Measured,
    Row,
    choice_luck,
    difference,
    gather,
    measure_column,
    pool_deviations,
)
from depthlm.report.sweep import Sweep
from depthlm.sweeps import Point, sweep_points

from .made_up import write_run

LOSS = Column(metric="validation_loss")


def point(label: str, directory: str, **settings: str) -> Point:
    """A point whose run directory is `home(directory)`; `__` in a setting's name stands for a dot."""
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    return Point([f"name={directory}"], dotted, {"label": label})


def home(directory: str) -> Path:
    return Path(f"outputs/name{directory}")


def rows(*points: Point) -> list[Row]:
    return gather(points)


def sweep(*points: Point) -> Sweep:
    return Sweep(Experiment(), gather(points), {"loss": LOSS}, [], [])


def test_seeds_form_one_row_with_mean_and_sample_deviation():
    for seed, loss in enumerate([3.0, 3.1, 3.5], 1):
        write_run(home(f"run-{seed}"), loss, parameters=49_650_000)
    (row,) = rows(*(point("Vanilla", f"run-{seed}", model="vanilla", seed=str(seed)) for seed in (1, 2, 3)))
    assert row.label == "Vanilla"
    loss_over_seeds = measure_column(row, LOSS)
    millions = measure_column(row, Column(metric="parameters", scale=1e6))
    assert millions is not None
    assert millions.mean == pytest.approx(49.65)
    assert loss_over_seeds == Measured(pytest.approx(3.2), pytest.approx(math.sqrt((0.04 + 0.01 + 0.09) / 2)), 3)


@pytest.mark.parametrize("means", [[3.0, 3.01], [3.0, 3.02, 3.2, 2.99], [3.0, 9.0]])
def test_the_luck_of_a_choice_is_that_of_drawing_the_means_again(means):
    drawn = np.random.default_rng(1).normal(means, 0.02, (100_000, len(means)))
    assert choice_luck(means, 0.02) == pytest.approx(np.std(np.array(means)[drawn.argmin(1)]), abs=1e-4)


def test_an_interval_adds_the_luck_of_the_choice_by_squares():
    over_seeds = 4.30265 * 0.02 / math.sqrt(3)
    assert Measured(0.1, 0.02, 3, luck=0.01).interval == pytest.approx(math.hypot(over_seeds, 1.95996 * 0.01), rel=1e-5)


def test_a_row_is_named_by_its_label_and_differing_settings_or_its_mechanism():
    (row,) = gather([Point(["output_dir=a"], {"model/attention": "moda", "seed": "2"})])
    assert (row.label, row.seeds) == ("moda", ["2"])
    rates = rows(*(point("A", name, size="tiny", optimizer__lr=f"{name}e-3") for name in "12"))
    assert [row.label for row in rates] == ["A, lr 1e-3", "A, lr 2e-3"]
    labels = [row.label for row in gather(sweep_points(["data=local", "data.source=/a/train,/b/train"]))]
    assert labels == ["source /a/train", "source /b/train"]


def test_differences_are_taken_between_runs_of_one_seed():
    for name, losses in {"vanilla": [3.0, 3.4], "moda": [2.9, 3.28]}.items():
        for seed, loss in enumerate(losses, 1):
            write_run(home(f"{name}-{seed}"), loss)
    base, other = rows(
        *(point(name, f"{name}-{seed}", model=name, seed=str(seed)) for name in ("vanilla", "moda") for seed in (1, 2))
    )
    paired = difference(other, base, LOSS)
    assert paired == Measured(pytest.approx(-0.11), pytest.approx(0.02 / math.sqrt(2)), 2)
    # without a common seed, the means
    base, other = rows(point("A", "vanilla-1", model="a", seed="1"), point("B", "moda-1", model="b", seed="2"))
    assert difference(other, base, LOSS) == Measured(pytest.approx(-0.1), None, 0)


def test_a_row_is_compared_with_the_baseline_of_its_size():
    compared = sweep(
        point("Vanilla 1B", "a", model="vanilla", size="1b"),
        point("Vanilla 3B", "b", model="vanilla", size="3b"),
        point("MoDA 1B", "c", model="moda", size="1b"),
        point("MoDA 3B", "d", model="moda", size="3b"),
        point("MoDA 7B", "e", model="moda", size="7b"),
    )
    references = [compared.reference_of(row) for row in compared.rows]
    assert [None if of is None else of.label for of in references] == [
        "Vanilla 1B", "Vanilla 3B", "Vanilla 1B", "Vanilla 3B", None,
    ]  # fmt: skip
    # without a baseline, the first row of the task is the reference
    compared = sweep(point("A", "a", model="dca", model__k="1"), point("B", "b", model="dca", model__k="2"))
    assert compared.reference_of(compared.rows[1]) is compared.rows[0]


def test_pooling_weights_variances_by_their_degrees_of_freedom():
    # Student's t of two degrees of freedom is 4.303
    assert Measured(3.0, 0.1, 3).interval == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-3)
    assert Measured(3.0, None, 1).interval is None
    numbers = pool_deviations([Measured(3.0, 0.1, 5), Measured(2.9, 0.2, 3), Measured(2.8, None, 1)])
    assert [number.mean for number in numbers] == [3.0, 2.9, 2.8]
    assert {number.freedom for number in numbers} == {6}
    assert numbers[0].deviation == pytest.approx(math.sqrt((4 * 0.01 + 2 * 0.04) / 6))
    assert numbers[2].interval == pytest.approx(2.447 * math.sqrt(0.02), rel=1e-3)
    assert pool_deviations([Measured(3.0, None, 1)]) == [Measured(3.0, None, 1)]
    # a difference without a common seed gets no interval
    numbers = pool_deviations([Measured(-0.1, 0.01, 3), Measured(-0.5, None, 0)])
    assert numbers[0].interval is not None
    assert numbers[1] == Measured(-0.5, None, 0)


def test_the_best_row_is_better_at_every_common_seed():
    losses = {"a": {1: 3.0, 2: 3.1}, "b": {1: 2.9, 2: 3.001, 3: 3.6}}
    for name, by_number in losses.items():
        for seed, loss in by_number.items():
            write_run(home(f"{name}-{seed}"), loss)
    points = [point(name, f"{name}-{seed}", model=name, seed=str(seed)) for name, of in losses.items() for seed in of]
    # the mean of b is higher because of its third seed, but b is lower at the other two
    assert sweep(*points).best(LOSS) == set()
    assert sweep(*(point for point in points if point.seed != "3")).best(LOSS) == {"b"}
