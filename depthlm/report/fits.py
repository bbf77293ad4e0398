"""Power laws fitted to measured points, and what a baseline needs to reach another model's loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# x values that differ by less than this factor do not determine a slope
SPAN = 1.1
# a law is not used beyond this factor outside its points
REACH = 10.0


@dataclass(frozen=True)
class PowerLaw:
    """y = a x^b, fitted by least squares of log y over log x. r2: share of variance explained; None for constant y.

    lowest, highest: the smallest and the largest x of its points.
    """

    a: float
    b: float
    r2: float | None
    points: int
    lowest: float
    highest: float

    def at(self, x: float) -> float:
        """Return y at x."""
        return math.exp(math.log(self.a) + self.b * math.log(x))


@dataclass(frozen=True)
class Needed:
    """The x at which a law reaches a value. extrapolated: whether x is outside the law's points."""

    x: float
    extrapolated: bool


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw | None:
    """Fit the law to points of positive x and y; None where no two x differ by at least the factor SPAN."""
    if len(x) < 2 or min(x) <= 0 or min(y) <= 0 or max(x) < SPAN * min(x):
        return None
    log_x, log_y = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    # centred, so that a compute of 1e-10 PFLOP/s-days loses no digits
    from_x, from_y = log_x - log_x.mean(), log_y - log_y.mean()
    b = float(from_x @ from_y / (from_x @ from_x))
    a = math.exp(log_y.mean() - b * log_x.mean())
    variance = float(from_y @ from_y)
    residual = float(np.square(from_y - b * from_x).sum())
    r2 = 1 - residual / variance if variance > 1e-24 * len(y) else None
    return PowerLaw(a, b, r2, len(x), min(x), max(x))


def needed(law: PowerLaw, y: float) -> Needed | None:
    """Return where the law reaches y; None where it does not fall, or only beyond a factor REACH outside its points."""
    if law.b >= 0 or y <= 0:
        return None
    log_x = (math.log(y) - math.log(law.a)) / law.b
    if not math.log(law.lowest / REACH) <= log_x <= math.log(law.highest * REACH):
        return None
    x = math.exp(log_x)
    # a value at the edge does not count as outside
    return Needed(x, not law.lowest * (1 - 1e-9) <= x <= law.highest * (1 + 1e-9))
