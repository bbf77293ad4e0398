"""Comparisons that select runs: `model=mhc`, `optimizer.lr>1e-3`, `tokens>=1M`, `age<2d`."""

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from depthlm.config.errors import nearest
from depthlm.counts import SCALES, parse_count
from depthlm.errors import UserError
from depthlm.runs.records import STATES

AGE = "age"
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
ORDERS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
# a pattern of directories, such as `*/lr=0.1`, begins with another character than a key
COMPARISON = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*(!=|<=|>=|==|=|<|>)\s*(.*?)\s*", re.DOTALL)
WITHOUT_KEY = re.compile(r"\s*(!=|[=<>])")
COUNT = re.compile(rf"\d[\d_]*(\.\d+)?[{''.join(SCALES)}]", re.IGNORECASE)
AGE_TEXT = re.compile(rf"(\d+(?:\.\d+)?)\s*([{''.join(SECONDS)}])")


@dataclass(frozen=True)
class Comparison:
    """A comparison of one value of a run. number: the text as a number, in seconds for an age; None if it is none."""

    key: str
    operator: str
    text: str
    number: float | None

    def matches(self, values: Mapping[str, Any]) -> bool:
        """Return whether the values of a run satisfy the comparison; false for a run without this value."""
        if self.key not in values:
            return False
        value = values[self.key]
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
        if self.operator in ORDERS:
            return number is not None and self.number is not None and ORDERS[self.operator](number, self.number)
        if number is not None and self.number is not None:
            equal = number == self.number
        else:
            equal = value_text(value) == self.text or fnmatchcase(value_text(value), self.text)
        return equal == (self.operator == "=")


def parse_comparison(text: str) -> Comparison | None:
    """Return the comparison that a filter states, or None for a word or a pattern.

    Raises UserError if the key or the value is missing, if the state is none that a run can have, or if it compares
    with something other than a number by <, <=, > or >=, or an age with no time.
    """
    match = COMPARISON.fullmatch(text)
    if match is None:
        if WITHOUT_KEY.match(text):
            raise UserError(f"{text}: a comparison begins with a key, as in `loss<3.2` or `model=mhc`")
        return None
    key, sign, value = match[1], match[2].replace("==", "="), match[3]
    if not value and sign not in ORDERS:
        raise UserError(f"{text}: nothing to compare {key} with; give a value, as in `model=mhc`")
    if key == "state" and sign not in ORDERS and not any(fnmatchcase(state, value) for state in STATES):
        raise UserError(f"{text}: no run has this state; allowed: {', '.join(STATES)}{nearest(value, STATES)}")
    if key == AGE:
        seconds = _seconds(value)
        if seconds is None:
            raise UserError(f"{text}: an age is a number with the unit s, m, h or d, as in `age{sign}2d`")
        return Comparison(key, sign, value, seconds)
    number = parse_number(value)
    if number is None and sign in ORDERS:
        raise UserError(f"{text}: {sign} needs a number, as in `{key}{sign}3.2` or `{key}{sign}10B`; `=` compares text")
    return Comparison(key, sign, value, number)


def parse_number(text: str) -> float | None:
    """Return 3.2, 1e-3 or a count such as 10B as a number; None for anything else, and for nan and infinity."""
    try:
        # parse_count is slow for 1e99999999, but exact for large counts and for 1.1B
        return parse_count(text) if re.fullmatch(r"[\d_]+", text) or COUNT.fullmatch(text) else _finite(float(text))
    except ValueError:
        return None


def value_text(value: Any) -> str:
    """Return a value as a user writes it in an override: null, true, [1,2]."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value).replace(", ", ",") if isinstance(value, list) else str(value)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _seconds(text: str) -> float | None:
    match = AGE_TEXT.fullmatch(text)
    return None if match is None else float(match[1]) * SECONDS[match[2]]
