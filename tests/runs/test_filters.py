"""Comparisons of a filter: how their text is read, and what they match."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthlm.errors import UserError
from depthlm.runs.filters import parse_comparison, parse_number, value_text

KEYS = st.from_regex(r"[a-z_]{1,8}(\.[a-z_]{1,8}){0,2}", fullmatch=True).filter(lambda key: key != "age")
SIGNS = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
NUMBERS = st.integers(-(10**15), 10**15) | st.floats(allow_nan=False, allow_infinity=False)


@given(key=KEYS, sign=st.sampled_from(sorted(SIGNS)), bound=NUMBERS, value=NUMBERS)
def test_a_comparison_with_a_number_is_that_of_python(key: str, sign: str, bound: float, value: float) -> None:
    comparison = parse_comparison(f"{key}{sign}{bound!r}")
    assert comparison is not None
    assert comparison.matches({key: value}) == SIGNS[sign](value, bound)
    assert comparison.matches({key: bound}) == SIGNS[sign](0, 0)
    assert not comparison.matches({f"{key}x": value})


@given(st.text() | st.builds("{}{}{}".format, KEYS | st.just("age"), st.sampled_from(sorted(SIGNS)), st.text()))
def test_any_text_is_a_comparison_a_word_or_the_users_mistake(text: str) -> None:
    with suppress(UserError):
        comparison = parse_comparison(text)
        assert comparison is None or isinstance(comparison.matches({comparison.key: 1.0}), bool)


@given(key=KEYS, text=st.text(st.characters(blacklist_categories=["Cs"]), min_size=1).filter(lambda t: t == t.strip()))
def test_a_text_equals_itself_whatever_it_contains(key: str, text: str) -> None:
    for sign in ("=", "=="):
        comparison = parse_comparison(f"{key}{sign} {text}")
        if comparison is not None and comparison.key == key and comparison.text == text:
            assert comparison.matches({key: text})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3.2", 3.2), ("1e-3", 0.001), ("-1", -1), ("1M", 1_000_000), ("1.1b", 1_100_000_000), ("2_000", 2000),
        ("10B", 10**10), ("nan", None), ("inf", None), ("1e999", None), ("2d", None), ("", None), ("0.0001K", None),
        ("1e999999999K", None), ("360m_wide", None), ("9007199254740993", 9007199254740993),
    ],
)  # fmt: skip
def test_counts_and_decimal_numbers_are_read(text: str, number: float | None) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("5m", 300), ("1.5h", 5400), ("2d", 172_800), ("2 d", 172_800)]
)
def test_an_age_has_a_unit(text: str, seconds: float) -> None:
    comparison = parse_comparison(f"age < {text}")
    assert comparison is not None
    assert comparison.number == seconds
    assert comparison.matches({"age": seconds - 1})
    assert not comparison.matches({"age": seconds})


@pytest.mark.parametrize("text", ["age<2", "age<d", "age=today", "age<-2d", "loss<", "loss>=low", "state<failed"])
def test_a_bound_that_is_no_number_is_an_error(text: str) -> None:
    with pytest.raises(UserError, match="number"):
        parse_comparison(text)


@pytest.mark.parametrize("text", ["mhc", "outputs/sweep/*", "*/lr=0.1", "360m", "[=]"])
def test_a_word_or_a_pattern_is_no_comparison(text: str) -> None:
    assert parse_comparison(text) is None


@pytest.mark.parametrize(
    ("text", "value", "matches"),
    [
        ("k=nano_*", "nano_60k", True),
        ("k=NANO_*", "nano_60k", False),
        ("k!=nano_*", "nano_60k", False),
        ("k=360m", "360m", True),
        ("k=[a]", "[a]", True),
        ("k=true", True, True),
        ("k=1", True, False),
        ("k=null", None, True),
        ("k<1", None, False),
        ("k<1", "0", False),
        ("k=[0.9,0.95]", [0.9, 0.95], True),
        ("k=1?", 12, True),
    ],
)
def test_text_flags_and_lists_are_compared_as_they_are_written(text: str, value: object, matches: bool) -> None:
    comparison = parse_comparison(text)
    assert comparison is not None
    assert comparison.matches({"k": value}) == matches


def test_values_are_written_as_in_an_override() -> None:
    assert [value_text(value) for value in (None, True, [1, 2], 0.5)] == ["null", "true", "[1,2]", "0.5"]
