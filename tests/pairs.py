"""Cases that cover every pair of values, in place of a product of everything."""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]


def covering(allowed: Callable[[Row], bool] = lambda row: True, **axes: Sequence[Any]) -> list[Row]:
    """Return rows, one value per axis, in which every pair of values of two axes occurs at least once.

    allowed: whether a row is a case, also asked of rows that have some of the axes only. A pair that no row may have
    is left out. The rows are few, not the fewest: each one begins with a pair that is missing and takes, axis by axis,
    the value with the most missing pairs.
    """
    missing = {
        frozenset({(one, a), (two, b)}): None
        for one, two in combinations(axes, 2)
        for a in axes[one]
        for b in axes[two]
    }
    rows: list[Row] = []
    while missing:
        first = next(iter(missing))
        row = dict(first)
        del missing[first]
        if not allowed(row):
            continue
        for axis, values in axes.items():
            if axis not in row:
                choices = [value for value in values if allowed(row | {axis: value})]
                if not choices:
                    break
                # of equal values, another one in each row
                start = len(rows) % len(choices)
                row[axis] = max(
                    choices[start:] + choices[:start],
                    key=lambda value, axis=axis: sum(
                        frozenset({(axis, value), other}) in missing for other in row.items()
                    ),
                )
        else:
            rows.append({axis: row[axis] for axis in axes})
            for pair in combinations(row.items(), 2):
                missing.pop(frozenset(pair), None)
    return rows
