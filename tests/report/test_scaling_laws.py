"""Scaling laws: fits of points with a known law, and made-up sweeps with their savings and missing numbers."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import linregress

from depthlm.report.rows import student_t
from depthlm.report.scaling_laws import curves, fit_power_law, ratio_interval, savings

from .made_up import directories, experiment, is_png, reported, row, sweep, write_run

LOSS = {"loss": {"title": "loss", "metric": "validation_loss"}}
SIZES = (1, 2, 4, 8)


def trained(loss: Callable[[str, float, int], float], seeds: tuple[str, ...] = (), **settings: object):
    """Return an experiment of two mechanisms at SIZES, trained to loss(mechanism, millions of parameters, seed)."""
    points = [{"label": label, "model": label, "size.num_layers": list(SIZES)} for label in ("vanilla", "dca")]
    of = experiment(points=points, columns=LOSS, figure="scaling", **settings)
    for number, directory in enumerate(directories(of, seeds=seeds)):
        size, seed = SIZES[number % 4], number // 8
        mechanism = "dca" if number % 8 >= 4 else "vanilla"
        compute = 8.64e19 * size * size
        write_run(directory, loss(mechanism, size, seed), parameters=1e6 * size, training_flops=compute)
    return of


def exact(mechanism: str, size: float, seed: int) -> float:
    """dca reaches with N parameters the loss that vanilla reaches with 1.25 N."""
    return 4 * (size * (1.25 if mechanism == "dca" else 1)) ** -0.1


def noisy(mechanism: str, size: float, seed: int) -> float:
    """The same, with noise that the two mechanisms share for one seed and size, and a little of their own."""
    shared = np.random.default_rng([seed, int(size)]).normal(0, 0.02)
    own = np.random.default_rng([seed, int(size), len(mechanism)]).normal(0, 0.002)
    return exact(mechanism, size, seed) * math.exp(shared + own)


@pytest.mark.usefixtures("rendered")
def test_the_report_has_the_fit_and_the_savings():
    text = reported(trained(exact, fits={"vanilla": [1.891, -0.057]}))
    fit = row(text, "vanilla", 0)
    assert (fit[0], fit[1][:2], fit[2][:7], *fit[3:]) == ("4", "4 ", "-0.0500", "1.0000", "1.891", "-0.057")
    assert row(text, "dca", 0)[-2:] == ["–", "–"]
    assert row(text, "dca, 2", 3) == ["2M", "3.650", "1.25", "1.56"]
    assert row(text, "dca, 8", 3) == ["8M", "3.177", "1.25 \\*", "1.56 \\*"]
    assert "\\*: extrapolated beyond these sizes." in text
    assert "for the loss of dca, 4." in text
    assert "Dotted lines" in text
    assert is_png("scaling.png")


def test_seeds_give_intervals_that_cover_the_truth():
    seeds = ("1", "2", "3")
    of = trained(noisy, seeds)
    trained_sweep = sweep(of, seeds=seeds)
    fitted = curves(trained_sweep)
    saved = savings(trained_sweep, fitted)
    assert len(saved) == len(SIZES)
    for entry in saved:
        assert entry.log_ratio.interval is not None
        # pairing removes the noise that the mechanisms share; an interval at 95% may miss the truth, but hardly by far
        assert 0.001 < entry.log_ratio.interval < 0.006
        assert abs(entry.log_ratio.mean - math.log(1.25**-0.1)) < 1.5 * entry.log_ratio.interval
        needs = entry.needs["parameters"]
        assert needs is not None
        assert needs.interval is not None
        assert needs.interval[0] < needs.factor < needs.interval[1]
        assert needs.interval[0] * 0.99 < 1.25 < needs.interval[1] * 1.01
        assert needs.is_clear
    text = reported(of, seeds=seeds)
    assert row(text, "dca, 2", 3)[2].startswith("1.2")


@pytest.mark.parametrize(("losses", "compute"), [([], []), ([3.0, 2.9], [1.0, 2.0]), ([2.9, 3.0], [1.0, 2.0])])
def test_too_few_points_give_no_factors(losses, compute):
    points = [{"label": label, "model": label, "size.num_layers": [2, 4]} for label in ("vanilla", "dca")]
    of = experiment(points=points, columns=LOSS, figure="scaling")
    vanilla, dca = directories(of)[:2], directories(of)[2:]
    for directory, loss, flops in zip(vanilla, losses, compute, strict=False):
        write_run(directory, loss, parameters=1e6 * flops, training_flops=1e15 * flops)
    if losses:
        write_run(dca[0], 2.95)
    text = reported(of)
    assert "What vanilla needs" not in text
    assert Path("report/scaling.png").exists() == bool(losses)


def test_rows_of_two_optimizers_have_no_common_law():
    points = [
        {"label": name, "model": "vanilla", "optimizer": name, "size.num_layers": list(SIZES)}
        for name in ("adamw", "muon")
    ]
    for count, laws in ((1, 2), (2, 0)):
        of = experiment(points=points[:count], columns=LOSS, figure="scaling")
        for number, directory in enumerate(directories(of)):
            size = SIZES[number % 4]
            write_run(directory, exact("vanilla", size, 0), parameters=1e6 * size, training_flops=8.64e19 * size * size)
        (curve,) = curves(sweep(of))
        assert sum(law is not None for law in curve.laws.values()) == laws


@given(
    a=st.floats(1e-3, 1e3),
    b=st.floats(-1, 1).filter(lambda b: abs(b) > 1e-3),
    start=st.floats(1e-12, 1e12),
    factors=st.lists(st.floats(1.2, 10), min_size=1, max_size=6),
)
def test_any_law_is_recovered(a, b, start, factors):
    x = [start]
    for factor in factors:
        x.append(x[-1] * factor)
    law = fit_power_law(x, [a * value**b for value in x])
    assert law is not None
    assert law.b == pytest.approx(b, abs=1e-8)
    assert law.a == pytest.approx(a, rel=1e-6)
    assert law.r2 == pytest.approx(1)
    assert law.at(x[0]) == pytest.approx(a * x[0] ** b)


def test_too_few_points_give_no_law_no_r2_or_no_intervals():
    for x, y in (([], []), ([1.0], [2.0]), ([1.0, 1.05, 1.0], [2.0, 1.9, 2.1]), ([1.0, 2.0], [2.0, 0.0])):
        assert fit_power_law(x, y) is None
    constant, two = fit_power_law([1.0, 2.0, 4.0], [2.0, 2.0, 2.0]), fit_power_law([1.0, 2.0], [3.0, 2.9])
    assert constant is not None
    assert constant.r2 is None
    assert two is not None
    assert (two.a_interval, two.b_interval) == (None, None)


@given(seed=st.integers(0, 1000), points=st.integers(3, 12))
def test_the_intervals_are_those_of_a_linear_regression(seed, points):
    generator = random.Random(seed)
    x = [1e-9 * 2**i for i in range(points)]
    y = [3 * c**-0.08 * math.exp(generator.gauss(0, 0.01)) for c in x]
    law = fit_power_law(x, y)
    assert law is not None
    assert law.a_interval is not None
    assert law.b_interval is not None
    line = linregress(np.log(x), np.log(y))
    t = student_t(points - 2)
    assert law.b_interval == pytest.approx((line.slope - t * line.stderr, line.slope + t * line.stderr), rel=1e-6)
    ends = [line.intercept - t * line.intercept_stderr, line.intercept + t * line.intercept_stderr]
    assert np.log(law.a_interval) == pytest.approx(ends, rel=1e-6)


def test_a_law_is_usable_if_it_surely_falls_and_explains_the_variance():
    for losses, is_usable in (
        ([3.0, 2.9, 2.8], True),
        ([3.0, 3.0, 3.0], False),
        ([3.0, 3.1, 3.2], False),
        ([3.0, 2.6, 2.9], False),
        # two points are on any law
        ([3.0, 2.9], False),
        # an R² of 0.97 over three points, but an exponent that may be 0
        ([3.0, 2.85, 2.8], False),
    ):
        law = fit_power_law([1.0, 2.0, 4.0][: len(losses)], losses)
        assert law is not None
        assert law.usable is is_usable


def test_the_interval_of_a_ratio_covers_it_as_often_as_it_says():
    generator = np.random.default_rng(1)
    numerators, denominators = generator.normal(-0.02, 0.005, 4000), generator.normal(-0.08, 0.008, 4000)
    covered = 0
    for numerator, denominator in zip(numerators, denominators, strict=True):
        ends = ratio_interval(float(numerator), 1.96 * 0.005, float(denominator), 1.96 * 0.008)
        assert ends is not None
        assert ends[0] <= numerator / denominator <= ends[1]
        covered += ends[0] <= 0.25 <= ends[1]
    assert 0.94 < covered / 4000 < 0.96
    # a denominator that may be zero
    assert ratio_interval(-0.02, 0.001, -0.08, 0.09) is None
