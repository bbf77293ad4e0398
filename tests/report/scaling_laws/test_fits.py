"""Fits of power laws to points with a known law, and their confidence intervals."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import linregress

from depthlm.report.rows import student_t
from depthlm.report.scaling_laws.fits import Needed, fit_power_law, ratio_interval


def test_the_law_of_attention_residuals_is_recovered() -> None:
    compute = [0.3, 0.5, 1.1, 2.4, 5.0]
    law = fit_power_law(compute, [1.891 * c**-0.057 for c in compute])
    assert law is not None
    assert (law.a, law.b) == pytest.approx((1.891, -0.057))
    assert law.r2 == pytest.approx(1)
    assert (law.points, law.lowest, law.highest) == (5, 0.3, 5.0)


@given(
    a=st.floats(1e-3, 1e3),
    b=st.floats(-1, 1).filter(lambda b: abs(b) > 1e-3),
    start=st.floats(1e-12, 1e12),
    factors=st.lists(st.floats(1.2, 10), min_size=1, max_size=6),
)
def test_any_law_is_recovered(a: float, b: float, start: float, factors: list[float]) -> None:
    x = [start]
    for factor in factors:
        x.append(x[-1] * factor)
    law = fit_power_law(x, [a * value**b for value in x])
    assert law is not None
    assert law.b == pytest.approx(b, abs=1e-8)
    assert law.a == pytest.approx(a, rel=1e-6)
    assert law.r2 == pytest.approx(1)
    assert law.at(x[0]) == pytest.approx(a * x[0] ** b)


def test_noise_changes_the_exponent_by_its_standard_error_and_lowers_r2() -> None:
    generator = random.Random(1)
    x = [1.3**i for i in range(30)]
    noise = 0.01
    law = fit_power_law(x, [3 * c**-0.08 * math.exp(generator.gauss(0, noise)) for c in x])
    assert law is not None
    logs = [math.log(c) for c in x]
    mean = sum(logs) / len(logs)
    error = noise / math.sqrt(sum((value - mean) ** 2 for value in logs))
    assert abs(law.b + 0.08) < 4 * error
    assert law.r2 is not None
    assert 0.9 < law.r2 < 1


def test_too_few_points_of_different_x_give_no_law() -> None:
    assert fit_power_law([], []) is None
    assert fit_power_law([1.0], [2.0]) is None
    assert fit_power_law([1.0, 1.05, 1.0], [2.0, 1.9, 2.1]) is None
    assert fit_power_law([1.0, 2.0], [2.0, 0.0]) is None


def test_a_constant_has_no_r2() -> None:
    law = fit_power_law([1.0, 2.0, 4.0], [2.0, 2.0, 2.0])
    assert law is not None
    assert law.r2 is None


@given(seed=st.integers(0, 1000), points=st.integers(3, 12))
def test_the_intervals_are_those_of_a_linear_regression(seed: int, points: int) -> None:
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


def test_two_points_have_no_intervals() -> None:
    law = fit_power_law([1.0, 2.0], [3.0, 2.9])
    assert law is not None
    assert (law.a_interval, law.b_interval) == (None, None)


@pytest.mark.parametrize(
    ("losses", "is_usable"),
    [
        ([3.0, 2.9, 2.8], True),
        ([3.0, 3.0, 3.0], False),
        ([3.0, 3.1, 3.2], False),
        ([3.0, 2.6, 2.9], False),
        # two points are on any law
        ([3.0, 2.9], False),
        # an R² of 0.97 over three points, but an exponent that may be 0
        ([3.0, 2.85, 2.8], False),
    ],
)
def test_a_law_is_usable_if_it_surely_falls_and_explains_the_variance(losses: list[float], is_usable: bool) -> None:
    law = fit_power_law([1.0, 2.0, 4.0][: len(losses)], losses)
    assert law is not None
    assert law.usable is is_usable


def test_students_t_agrees_with_printed_tables() -> None:
    assert [round(student_t(freedom), 3) for freedom in (1, 2, 4, 10)] == [12.706, 4.303, 2.776, 2.228]
    assert round(student_t(10, 0.99), 3) == 3.169


def test_the_interval_of_a_ratio_covers_it_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    numerators, denominators = generator.normal(-0.02, 0.005, 4000), generator.normal(-0.08, 0.008, 4000)
    covered = 0
    for numerator, denominator in zip(numerators, denominators, strict=True):
        ends = ratio_interval(float(numerator), 1.96 * 0.005, float(denominator), 1.96 * 0.008)
        assert ends is not None
        assert ends[0] <= numerator / denominator <= ends[1]
        covered += ends[0] <= 0.25 <= ends[1]
    assert 0.94 < covered / 4000 < 0.96


def test_a_denominator_that_may_be_zero_gives_no_interval() -> None:
    assert ratio_interval(-0.02, 0.001, -0.08, 0.09) is None


def test_a_factor_is_clear_if_its_interval_excludes_one() -> None:
    assert Needed(1.2, (1.1, 1.4), False).is_clear
    assert Needed(0.8, (0.7, 0.9), False).is_clear
    assert not Needed(1.2, (0.9, 1.6), False).is_clear
    # it is printed as [0.84, 1.00]
    assert not Needed(0.91, (0.84, 0.997), False).is_clear
    assert Needed(1.2, None, False).is_clear
