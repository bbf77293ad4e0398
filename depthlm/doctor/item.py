"""One line of the output of `doctor`."""

from dataclasses import dataclass

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True)
class Item:
    """The result of one check.

    state: a run starts despite a warning, but not with a problem. remedy: what to do about a warning or a problem.
    """

    name: str
    value: str
    state: str = OK
    remedy: str = ""
