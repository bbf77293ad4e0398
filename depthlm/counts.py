"""Numbers as text: counts with a unit (300M, 10B), bytes as GiB, durations as minutes, hours and days."""

from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator

SCALES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_count(value: Any) -> int:
    """Return 10, 2_000, `300M` or `1.5B` as an integer. Raises ValueError for anything else."""
    if isinstance(value, bool):
        raise ValueError(value)
    text = str(value).strip().replace("_", "")
    scale = SCALES.get(text[-1:].upper())
    # a Fraction is exact, while 4.1 * 10**9 is no integer in floating point
    try:
        number = Fraction(text[:-1] if scale else text) * (scale or 1)
    except (ZeroDivisionError, OverflowError):
        raise ValueError(value) from None
    if number.denominator != 1 or "/" in text:
        raise ValueError(value)
    return int(number)


def as_number(text: str) -> float | None:
    """Return a setting as a number, also in the form `10B`; None where it is not a number."""
    for parse in (float, parse_count):
        try:
            return float(parse(text))
        except ValueError:
            pass
    return None


# an integer that may also be written as `300M` or `10B`
Count = Annotated[int, BeforeValidator(parse_count)]


def count_text(number: float) -> str:
    """Format a count: 1343800000 as `1.344B`."""
    for unit, scale in reversed(SCALES.items()):
        if number >= scale:
            return f"{number / scale:.4g}{unit}"
    return f"{number:g}"


def format_count(number: int, unit: str) -> str:
    """Format a number of things: `1 rank`, `2 ranks`."""
    return f"{number} {unit}{'' if number == 1 else 's'}"


def duration_text(seconds: float) -> str:
    """Format a duration: 50 as `50 s`, 1080 as `18 min`, 11520 as `3 h 12 min`, 400000 as `4 days 15 h`."""
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")
    hours = round(seconds / 3600)
    days = format_count(hours // 24, "day")
    return f"{days} {hours % 24} h" if hours % 24 else days


def gib_text(count: float, digits: int = 2) -> str:
    """Format a number of bytes: 13.4e9 as `12.48 GiB`."""
    return f"{count / 2**30:.{digits}f} GiB"
