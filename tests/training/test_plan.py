"""Schedules against their closed forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthlm.config.schema import Schedule
from depthlm.training.plan import lr_factor

SHAPES = ("cosine", "inverse_sqrt", "wsd", "constant")


def factors(schedule: Schedule, warmup: int, steps: int) -> list[float]:
    return [lr_factor(schedule, step, warmup, steps) for step in range(steps)]


def test_warm_up_is_linear_and_reaches_the_peak():
    for name in SHAPES:
        curve = factors(Schedule(name=name, min_lr_ratio=0.0), 10, 100)
        assert curve[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])


def test_each_schedule_has_the_values_of_its_closed_form():
    cosine = factors(Schedule(name="cosine", min_lr_ratio=0.1), 10, 110)
    assert [cosine[59], cosine[-1]] == pytest.approx([0.55, 0.1])
    inverse_sqrt = factors(Schedule(name="inverse_sqrt", min_lr_ratio=0.0), 100, 1000)
    assert [inverse_sqrt[399], inverse_sqrt[899]] == pytest.approx([0.5, 1 / 3])
    wsd = factors(Schedule(name="wsd", min_lr_ratio=0.0, decay_ratio=0.2), 10, 100)
    assert wsd[9:80] == [1.0] * 71
    assert [wsd[89], wsd[-1]] == pytest.approx([0.5, 0.0])


@given(
    name=st.sampled_from(SHAPES),
    floor=st.floats(0, 1),
    decay=st.floats(0, 0.5),
    steps=st.integers(1, 300),
    share=st.floats(0, 0.5),
)
def test_every_factor_is_between_the_floor_and_the_peak_after_warm_up(name, floor, decay, steps, share):
    warmup = max(1, math.floor(share * steps))
    curve = factors(Schedule(name=name, min_lr_ratio=floor, decay_ratio=decay), warmup, steps)
    assert all(0 < factor <= 1 or (factor == 0 and floor == 0) for factor in curve)
    assert all(factor >= floor - 1e-12 for factor in curve[warmup:])
    assert all(a >= b - 1e-12 for a, b in zip(curve[warmup - 1 :], curve[warmup:], strict=False))
