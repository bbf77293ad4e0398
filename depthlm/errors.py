"""Errors that the user has to fix, and helpers for their messages."""

import difflib
from collections.abc import Iterable

from depthlm.counts import format_count


class UserError(Exception):
    """An error that only the user can fix. Commands print it without a traceback and exit with code 2."""


class DataError(UserError):
    """Data that cannot be used.

    what: what was wrong. where: the file, folder or key. remedy: what to do about it, as a sentence. An error of a
    process that prefetches is raised again by PyTorch, with all of its text as `what`.
    """

    def __init__(self, what: str, where: object = "", remedy: str = "") -> None:
        super().__init__(what, where, remedy)
        self.what, self.where, self.remedy = what, where, remedy

    def __str__(self) -> str:
        return f"{self.what}: {self.where}. {self.remedy}" if self.remedy else self.what


class ConfigError(UserError):
    """All mistakes in a configuration, one per line."""

    def __init__(self, errors: Iterable[str]) -> None:
        self.errors = list(dict.fromkeys(errors))
        head = f"{format_count(len(self.errors), 'error')} in the configuration:"
        super().__init__("\n".join([head, *(f"  - {error}" for error in self.errors)]))


def nearest(given: str, allowed: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean ...?` if an allowed value is similar, otherwise an empty string.

    cutoff: the least similarity, from 0 to 1; among thousands of values, some is similar to any text.
    """
    candidates = list(allowed)
    # a leaf typed without its group, as in `lr` for `optimizer.lr`; keys of size are only defaults of others
    leaves = [name for name in candidates if name.rsplit(".", 1)[-1] == given]
    close = sorted(leaves, key=lambda name: name.startswith("size."))[:3]
    # spelled with other capitals, as in `mHC`
    close = close or [name for name in candidates if name.casefold() == given.casefold()]
    close = close or difflib.get_close_matches(given, candidates, n=1, cutoff=cutoff)
    return f"; did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else ""


def join_names(allowed: Iterable[object]) -> str:
    """Return `a, b, c` in the given order."""
    return ", ".join(str(name) for name in allowed)
