"""The error that a wrong configuration raises, and its words."""

import difflib
from collections.abc import Iterable

from depthlm.errors import UserError


class ConfigError(UserError):
    """Everything that is wrong with a configuration, one line a mistake."""

    def __init__(self, errors: Iterable[str]) -> None:
        self.errors = list(dict.fromkeys(errors))
        count = len(self.errors)
        head = f"{count} error{'s' if count > 1 else ''} in the configuration:"
        super().__init__("\n".join([head, *(f"  - {error}" for error in self.errors)]))


def nearest(given: str, allowed: Iterable[str]) -> str:
    """`; did you mean ...?` where something close is allowed, else nothing."""
    candidates = list(allowed)
    # a leaf typed without its group, as in `lr` for `optimizer.lr`
    close = sorted((name for name in candidates if name.rsplit(".", 1)[-1] == given), key=_least_asked_last)[:3]
    close = close or difflib.get_close_matches(given, candidates, n=1, cutoff=0.6)
    return f"; did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else ""


def _least_asked_last(name: str) -> bool:
    # size.lr is but the default of optimizer.lr, and so on
    return name.startswith("size.")


def listed(allowed: Iterable[object]) -> str:
    """`a, b, c` in the order given."""
    return ", ".join(str(name) for name in allowed)
