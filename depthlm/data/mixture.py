"""The source of each sample of a mixture, a pure function of the sample's number."""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from depthlm.errors import DataError

# The longest period; computing its order of sources takes a second.
LONGEST_PERIOD = 2**20


class Schedule(NamedTuple):
    """A repeating period of samples. counts: number of samples of each source in a period, [k].

    source: index of each sample's source, [period]. place: number of earlier samples of its source in the period,
    [period].
    """

    counts: NDArray[np.int64]
    source: NDArray[np.int64]
    place: NDArray[np.int64]

    def locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each sample's source, and its number within that source; numbers: [any shape] of samples >= 0."""
        periods, offsets = np.divmod(numbers, len(self.source))
        source = self.source[offsets]
        return source, periods * self.counts[source] + self.place[offsets]

    def count_seen(self, samples: int) -> NDArray[np.int64]:
        """Return how many of the first `samples` samples come from each source, [k]."""
        periods, remainder = divmod(samples, len(self.source))
        return periods * self.counts + np.bincount(self.source[:remainder], minlength=len(self.counts))


def shares(weights: Sequence[float]) -> list[Fraction]:
    """Return the exact share of each source in the tokens: its weight divided by the sum of all weights.

    A weight has the decimal value as written. Shares that differ from simple fractions only by a float's rounding, such
    as 1/3, become those fractions. Raises DataError where their common denominator exceeds LONGEST_PERIOD.
    """
    written = [Fraction(str(weight)) for weight in weights]
    exact = [weight / sum(written) for weight in written]
    simple = [share.limit_denominator(LONGEST_PERIOD) for share in exact]
    close = all(abs(a - b) < Fraction(1, 10**13) for a, b in zip(simple, exact, strict=True))
    fractions = simple if close and sum(simple) == 1 else exact
    if lcm(*(share.denominator for share in fractions)) > LONGEST_PERIOD:
        rounded = ", ".join(str(max(1, round(share * 10**5))) for share in exact)
        what = f"weights {', '.join(map(str, weights))} have no common denominator up to {LONGEST_PERIOD:,}"
        raise DataError(what, "data.sources.<name>.weight", f"Round them, for example to {rounded}.")
    return fractions


@lru_cache(maxsize=8)
def schedule(weights: tuple[float, ...]) -> Schedule:
    """Return an order of k sources; for any n, each source's count in the first n samples is near its share of n.

    The difference is at most 1 - 1/(2k-2). Sample j of a source with share w is released at the first n with
    w n - j >= 1/(2k-2) and due at the last n with w n <= j + 1 - 1/(2k-2); of the released samples, the earliest due
    is next (Tijdeman 1980, the chairman assignment problem). n counts from 1.
    """
    fractions = shares(weights)
    period = lcm(*(share.denominator for share in fractions))
    counts, d = [int(share * period) for share in fractions], max(1, 2 * len(fractions) - 2)
    source = np.empty(period, dtype=np.int64)
    place = np.empty(period, dtype=np.int64)

    def window(index: int, j: int) -> tuple[int, int]:
        release, due = (j * d + 1) * period, ((j + 1) * d - 1) * period
        return -(-release // (counts[index] * d)), due // (counts[index] * d)

    # the next sample of each source: unreleased ones ordered by release, released ones by due date
    unreleased = sorted((*window(index, 0), index, 0) for index in range(len(counts)))
    released: list[tuple[int, int, int]] = []
    for n in range(1, period + 1):
        while unreleased and unreleased[0][0] <= n:
            heappush(released, heappop(unreleased)[1:])
        _, index, j = heappop(released)
        source[n - 1], place[n - 1] = index, j
        if j + 1 < counts[index]:
            heappush(unreleased, (*window(index, j + 1), index, j + 1))
    return Schedule(np.array(counts, dtype=np.int64), source, place)
