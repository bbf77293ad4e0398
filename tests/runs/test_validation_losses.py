"""The losses of a validation, as a record and in a row."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthlm.runs.records import ValidationLosses, finite, perplexity

LOSSES = st.none() | st.floats(min_value=0, max_value=100)


@given(st.dictionaries(st.text(min_size=1), LOSSES))
def test_a_row_gives_the_same_losses_back(by_set):
    row = {"step": 3, "loss": 2.0, **ValidationLosses(by_set).row()}
    assert ValidationLosses.of_row(row) == ValidationLosses(by_set)


def test_the_mean_needs_a_finite_loss_of_every_set():
    assert ValidationLosses({"a": 1.0, "b": 2.0}).mean == 1.5
    assert ValidationLosses({"a": 1.0, "b": None}).mean is None
    assert ValidationLosses({}).mean is None
    assert not ValidationLosses.of_row({"step": 1, "loss": 2.0, "validation/loss": 1.0})
    assert ValidationLosses({"a/b": math.log(7)}).row()["validation/a/b/perplexity"] == pytest.approx(7)


def test_a_value_that_is_not_a_finite_number_is_none():
    for value in (None, math.nan, math.inf, "2.0", True):
        assert finite(value) is None
        assert ValidationLosses.of_row({"validation/a/loss": value}).by_set == {"a": None}
    # it would overflow
    assert perplexity(800.0) is None
    assert perplexity(0.0) == 1.0
