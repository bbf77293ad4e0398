"""A line of what `doctor` prints."""

from dataclasses import dataclass

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True)
class Item:
    """One thing that was looked at. state: a run starts with a warning, and does not with a problem. remedy: what to
    do about either."""

    name: str
    value: str
    state: str = OK
    remedy: str = ""


def gibibytes(count: float) -> str:
    """`12.3 GiB`."""
    return f"{count / 2**30:.1f} GiB"
