"""Fits of power laws to points with a known law, and what a baseline needs by its law."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthlm.report.fits import REACH, fit_power_law, needed


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


@given(a=st.floats(0.1, 10), b=st.floats(-1, -0.02), share=st.floats(0, 1))
def test_the_needed_x_is_on_the_law(a: float, b: float, share: float) -> None:
    law = fit_power_law([10.0, 1000.0], [a * 10**b, a * 1000**b])
    assert law is not None
    x = 10 * 100**share
    needs = needed(law, a * x**b)
    assert needs is not None
    assert needs.x == pytest.approx(x, rel=1e-6)
    assert not needs.extrapolated


def test_beyond_the_points_the_needed_x_is_extrapolated_and_far_beyond_none() -> None:
    law = fit_power_law([1.0, 10.0], [3.0, 3.0 * 10**-0.1])
    assert law is not None
    near, far = needed(law, law.at(20)), needed(law, law.at(10.1 * REACH))
    assert near is not None
    assert near.extrapolated
    assert far is None


@pytest.mark.parametrize("losses", [[3.0, 3.0], [3.0, 3.1]])
def test_a_law_that_does_not_fall_reaches_no_lower_loss(losses: list[float]) -> None:
    law = fit_power_law([1.0, 10.0], losses)
    assert law is not None
    assert needed(law, 2.9) is None
