"""The slopes of the study of depth, and what they are computed from."""

import itertools
import math
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from benchmarks.study import depth
from benchmarks.study.depth import Study, between_mechanisms, group_gaps, slope

LAYERS, SEEDS = (6, 12, 24, 48), ("1", "2", "3")
EVERY = [*depth.STATIC, *depth.LEARNED]


def made_up(gain: float) -> Study:
    """Return a study in which each learned mechanism gains with each doubling of the depth, and no static one does."""
    rng = np.random.default_rng(0)
    vanilla = {layers: {seed: 2.7 + rng.normal(0, 0.02) for seed in SEEDS} for layers in LAYERS}
    losses = {
        (model, layers): {
            seed: loss - gain * math.log2(layers / 6) * (model in depth.LEARNED) + rng.normal(0, 0.01)
            for seed, loss in vanilla[layers].items()
        }
        for model, layers in itertools.product(EVERY, LAYERS)
    }
    points = {n: [(1000, by), (2000, {s: x * 0.9 for s, x in by.items()})] for n, by in vanilla.items()}
    return Study(losses, points, dict.fromkeys(losses, 1000))


def test_a_slope_is_the_change_per_doubling_with_its_interval() -> None:
    gaps = {(layers, seed): 0.3 - 0.05 * math.log2(layers) for layers, seed in itertools.product(LAYERS, SEEDS)}
    exact = slope(gaps)
    assert exact is not None
    assert (exact.mean, exact.low) == pytest.approx((-0.05, -0.05))
    rng = np.random.default_rng(1)
    noisy = {place: gap + rng.normal(0, 0.05) for place, gap in gaps.items()}
    found = slope(noisy)
    # the normal equations, and the table of Student's t for ten degrees of freedom
    x = np.array([[1.0, math.log2(layers)] for layers, _ in noisy])
    y = np.array([*noisy.values()])
    line = np.linalg.solve(x.T @ x, x.T @ y)
    half = 2.228 * math.sqrt(((y - x @ line) ** 2).sum() / 10 * np.linalg.inv(x.T @ x)[1, 1])
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((line[1], line[1] - half, line[1] + half), rel=1e-4)


def test_one_depth_has_no_slope() -> None:
    assert slope({(6, seed): 0.1 for seed in SEEDS}) is None
    assert slope({}) is None


def test_the_answers_find_a_gain_of_learned_reads_and_none_without_it() -> None:
    (shape, *numbers), _ = depth.answers(made_up(0.05)).rows
    assert shape.text == "minus vanilla"
    assert [cell.bold for cell in numbers] == [True, False, True, True]
    assert not any(cell.bold for row in depth.answers(made_up(0.0)).rows for cell in row)


def test_vanilla_with_more_parameters_lies_on_the_power_law_through_its_neighbours() -> None:
    law = {parameters: dict.fromkeys(SEEDS, 5.0 * parameters ** (-0.1)) for parameters in (1000, 1500, 3200)}
    study = Study({}, {48: [*law.items()]}, {})
    for parameters in (1000, 1200, 1500, 2000, 3200, 3300):
        assert study.vanilla_with(48, parameters)["2"] == pytest.approx(5.0 * parameters**-0.1)


def test_differences_at_equal_parameters_are_from_a_larger_vanilla() -> None:
    study = made_up(0.0)
    study = replace(study, parameters=dict.fromkeys(study.losses, 2000))
    gaps, equal = (study.gaps("mudd", equal) for equal in (False, True))
    base = study.vanilla[12][0][1]["1"]
    assert equal[12, "1"] - gaps[12, "1"] == pytest.approx(0.1 * base)


def test_a_group_waits_for_all_of_its_mechanisms() -> None:
    study = made_up(0.0)
    partly = {place: losses for place, losses in study.losses.items() if place != ("dca", 24)}
    assert {layers for layers, _ in group_gaps(replace(study, losses=partly), depth.LEARNED)} == {6, 12, 48}
    without = group_gaps(replace(study, losses=partly), depth.LEARNED, without=[("dca", 24)])
    others = [study.gaps(model)[24, "1"] for model in depth.LEARNED if model != "dca"]
    assert without[24, "1"] == pytest.approx(fmean(others))


def test_the_interval_over_mechanisms_is_welchs() -> None:
    slopes = [[0.1, 0.2, 0.4], [0.5, 0.9, 0.8, 1.0]]
    found = between_mechanisms(*([depth.Difference(x, x, x, 12, False) for x in group] for group in slopes))
    means, errors = [np.mean(g) for g in slopes], [np.var(g, ddof=1) / len(g) for g in slopes]
    freedom = sum(errors) ** 2 / sum(e**2 / (len(g) - 1) for e, g in zip(errors, slopes, strict=True))
    from scipy.stats import t

    half = t.ppf(0.975, freedom) * math.sqrt(sum(errors))
    assert found is not None
    assert (found.mean, found.high) == pytest.approx((means[0] - means[1], means[0] - means[1] + half))


def test_answers_are_also_given_without_runs_that_may_have_failed() -> None:
    study = made_up(0.05)
    failed = {**study.losses["mhc", 12], "3": 4.0}
    study = replace(study, losses={**study.losses, ("mhc", 12): failed})
    assert study.unstable() == (("mhc", 12),)
    labels = [row[0].text for row in depth.answers(study).rows]
    assert [label.partition(", ")[2] for label in labels] == ["", "", *["without mhc in 12 layers"] * 2]
    assert depth.answers(study).rows[2][1].bold


def test_every_mechanism_of_the_experiment_is_in_a_group() -> None:
    from benchmarks.study.archive import sweep_of
    from benchmarks.study.differences import values_of

    sweep = sweep_of("depth")
    models = {row.settings["model"] for row in [*sweep.selection, *sweep.rows]}
    assert models == {"vanilla", *EVERY}
    assert set(values_of(sweep, "model")) <= models
