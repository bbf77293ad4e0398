"""Which source each sample of a mixture comes from: a pure function of the sample's number."""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from depthlm.data.errors import DataError

# The longest period: its order of sources is computed at once, in a second.
LONGEST_PERIOD = 2**20


class Schedule(NamedTuple):
    """A period of samples; it repeats. counts: samples of each source in it, [k].

    source: of each sample, [period]. place: how many of its source came before it in the period, [period].
    """

    counts: NDArray[np.int64]
    source: NDArray[np.int64]
    place: NDArray[np.int64]

    def locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each sample, and its number among the samples of that source; [any shape] of samples >= 0."""
        periods, offsets = np.divmod(numbers, len(self.source))
        source = self.source[offsets]
        return source, periods * self.counts[source] + self.place[offsets]

    def seen(self, samples: int) -> NDArray[np.int64]:
        """How many of the first so many samples come from each source, [k]."""
        periods, rest = divmod(samples, len(self.source))
        return periods * self.counts + np.bincount(self.source[:rest], minlength=len(self.counts))


def shares(weights: Sequence[float]) -> list[Fraction]:
    """The share of each source in the tokens: its weight over the sum of all, exactly.

    A weight is what is written in decimals; shares that are simple fractions but for a float's last digits, as of 1/3,
    are those fractions. Raises DataError where their common denominator is beyond LONGEST_PERIOD.
    """
    written = [Fraction(str(weight)) for weight in weights]
    exact = [weight / sum(written) for weight in written]
    simple = [share.limit_denominator(LONGEST_PERIOD) for share in exact]
    close = all(abs(a - b) < Fraction(1, 10**13) for a, b in zip(simple, exact, strict=True))
    found = simple if close and sum(simple) == 1 else exact
    if lcm(*(share.denominator for share in found)) > LONGEST_PERIOD:
        rounded = ", ".join(str(max(1, round(share * 10**5))) for share in exact)
        what = f"weights {', '.join(map(str, weights))} have no common denominator up to {LONGEST_PERIOD:,}"
        raise DataError(what, "data.sources.<name>.weight", f"Round them, as to {rounded}.")
    return found


@lru_cache(maxsize=8)
def schedule(weights: tuple[float, ...]) -> Schedule:
    """An order of k sources in which each, in the first n samples of any n, is within 1 - 1/(2k-2) of its share of n.

    Sample j of a source with share w may come once w n - j >= 1/(2k-2), and must by w n <= j + 1 - 1/(2k-2); of those
    that may, the one that must first comes (Tijdeman 1980, the chairman assignment problem). n counts from 1.
    """
    exact = shares(weights)
    period = lcm(*(share.denominator for share in exact))
    counts, d = [int(share * period) for share in exact], max(1, 2 * len(exact) - 2)
    source = np.empty(period, dtype=np.int64)
    place = np.empty(period, dtype=np.int64)

    def window(index: int, j: int) -> tuple[int, int]:
        first, last = (j * d + 1) * period, ((j + 1) * d - 1) * period
        return -(-first // (counts[index] * d)), last // (counts[index] * d)

    # the next sample of each source: those that may not come yet by when they may, the others by when they must
    resting = sorted((*window(index, 0), index, 0) for index in range(len(counts)))
    ready: list[tuple[int, int, int]] = []
    for n in range(1, period + 1):
        while resting and resting[0][0] <= n:
            heappush(ready, heappop(resting)[1:])
        _, index, j = heappop(ready)
        source[n - 1], place[n - 1] = index, j
        if j + 1 < counts[index]:
            heappush(resting, (*window(index, j + 1), index, j + 1))
    return Schedule(np.array(counts, dtype=np.int64), source, place)
