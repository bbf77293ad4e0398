"""Power laws fitted to measured points, with confidence intervals, and what a baseline needs by its law."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from depthlm.report.rows import student_t

# x values that differ by less than this factor do not determine a slope
SPAN = 1.1
# a law is not used beyond this factor outside its points
REACH = 10.0
# a law that explains a smaller share of the variance is not used
MIN_R2 = 0.9


@dataclass(frozen=True)
class PowerLaw:
    """y = a x^b, fitted by least squares of log y over log x. r2: share of variance explained; None for constant y.

    lowest, highest: the smallest and the largest x of its points. a_interval, b_interval: 95% confidence intervals, by
    Student's t; None for two points, which any law fits exactly.
    """

    a: float
    b: float
    r2: float | None
    points: int
    lowest: float
    highest: float
    a_interval: tuple[float, float] | None = None
    b_interval: tuple[float, float] | None = None

    @property
    def usable(self) -> bool:
        """Whether y surely falls with x, and the law explains at least a share MIN_R2 of the variance of its points."""
        falls = self.b_interval is not None and self.b_interval[1] < 0
        return falls and self.r2 is not None and self.r2 >= MIN_R2

    def at(self, x: float) -> float:
        """Return y at x."""
        return math.exp(math.log(self.a) + self.b * math.log(x))


@dataclass(frozen=True)
class Needed:
    """The factor by which a baseline's x must grow to reach a value.

    interval: at 95%; None where a single seed leaves it unknown. extrapolated: whether that x is outside its points.
    """

    factor: float
    interval: tuple[float, float] | None
    extrapolated: bool

    @property
    def is_clear(self) -> bool:
        """Whether the interval, where there is one, excludes a factor of 1 as printed, with two digits."""
        return self.interval is None or not round(self.interval[0], 2) <= 1 <= round(self.interval[1], 2)


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw | None:
    """Fit the law to points of positive x and y; None where no two x differ by at least the factor SPAN."""
    if len(x) < 2 or min(x) <= 0 or min(y) <= 0 or max(x) < SPAN * min(x):
        return None
    log_x, log_y = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    # centred, so that a compute of 1e-10 PFLOP/s-days loses no digits
    mean_x, mean_y = float(log_x.mean()), float(log_y.mean())
    from_x, from_y = log_x - mean_x, log_y - mean_y
    spread = float(from_x @ from_x)
    b = float(from_x @ from_y / spread)
    log_a = mean_y - b * mean_x
    variance = float(from_y @ from_y)
    residual = float(np.square(from_y - b * from_x).sum())
    r2 = 1 - residual / variance if variance > 1e-24 * len(y) else None
    law = PowerLaw(math.exp(log_a), b, r2, len(x), min(x), max(x))
    if len(x) == 2:
        return law
    half = student_t(len(x) - 2) * math.sqrt(residual / (len(x) - 2))
    half_b, half_log_a = half / math.sqrt(spread), half * math.sqrt(1 / len(x) + mean_x**2 / spread)
    a_interval = float(np.exp(log_a - half_log_a)), float(np.exp(log_a + half_log_a))
    return replace(law, a_interval=a_interval, b_interval=(b - half_b, b + half_b))


def ratio_interval(
    numerator: float, half_width: float, denominator: float, denominator_half_width: float
) -> tuple[float, float] | None:
    """Return the confidence interval of a ratio from those of its two terms, which are taken as independent.

    It is Fieller's, with the half widths of the terms instead of their standard errors, so that they may have different
    degrees of freedom.
    None where the denominator's interval contains 0, so that the ratio may have any value.
    """
    quadratic = denominator**2 - denominator_half_width**2
    if quadratic <= 0:
        return None
    middle = numerator * denominator / quadratic
    root = middle**2 - (numerator**2 - half_width**2) / quadratic
    half = math.sqrt(max(root, 0.0))
    return middle - half, middle + half
