"""Scaling laws of each series of a sweep, and what the baseline needs for the losses of the others."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from depthlm.config.experiment import Column
from depthlm.counts import count_text
from depthlm.report.rows import Measured, Row, difference, measure_column, pool_deviations, student_t
from depthlm.report.sweep import Sweep
from depthlm.report.tables import DASH, Table, cells, number_text

# x values that differ by less than this factor do not determine a slope
SPAN = 1.1
# a law is not used beyond this factor outside its points
REACH = 10.0
# a law that explains a smaller share of the variance is not used
MIN_R2 = 0.9
PFLOPS_DAY = 8.64e19
# what losses are compared at: the x of each law
VIEWS = {
    "parameters": Column(title="parameters", metric="parameters"),
    "compute": Column(title="training compute (PFLOP/s-days)", metric="training_flops", scale=PFLOPS_DAY),
}
NEEDS = {
    "parameters": "times the parameters",
    "compute": "times the compute",
    "time": "times the training time",
    "generation": "times the memory of generation",
}
LEGEND = (
    f"A fit needs two points whose compute differs by a factor of {SPAN:g}; two points do not show its quality. A "
    f"factor needs a fit of the baseline with an R² of {MIN_R2:g} and an exponent whose interval is below 0. It is not "
    f"given where it may be 1, or where the loss is more than {REACH:g} times outside the baseline's sizes. "
    "*: extrapolated beyond these sizes. Intervals are at 95%: of differences paired by seed, whose variance is pooled "
    "over the sizes of a series, and of the slope of the baseline. They hold for each number alone: of twenty, one is "
    "expected to miss. Factors without an interval are of one seed: how far chance goes is unknown."
)


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

    def __str__(self) -> str:
        """Return the factor with its interval, for a table."""
        if self.interval is None:
            return number_text(self.factor, 2)
        ends = [number_text(end, 2) if end <= REACH else f"over {REACH:g}" for end in self.interval]
        return f"{number_text(self.factor, 2)} [{', '.join(ends)}]"


@dataclass(frozen=True)
class Size:
    """A complete row of a series. x: its number in each view, 0 if unknown. loss: of the first column, over seeds."""

    row: Row
    x: dict[str, float]
    loss: float


@dataclass(frozen=True)
class Curve:
    """A series: its complete sizes, fewest parameters first, and its fit of the loss in each view."""

    series: str
    name: str
    sizes: list[Size]
    laws: dict[str, PowerLaw | None]


@dataclass(frozen=True)
class Saving:
    """What the baseline needs to reach the loss of one size of another series, in each view; None: unknown.

    reference: the baseline's size of the same task. log_ratio: the log of the size's loss over the reference's, paired
    by seed.
    """

    curve: Curve
    size: Size
    reference: Size
    log_ratio: Measured
    needs: dict[str, Needed | None]


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw | None:
    """Fit the law to points of positive x and y; None where no two x differ by at least the factor SPAN."""
    from scipy.stats import linregress

    if len(x) < 2 or min(x) <= 0 or min(y) <= 0 or max(x) < SPAN * min(x):
        return None
    log_x, log_y = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    line = linregress(log_x, log_y)
    slope, intercept = float(line.slope), float(line.intercept)
    r2 = float(line.rvalue) ** 2 if np.ptp(log_y) > 1e-12 else None
    a_interval = b_interval = None
    if len(x) > 2:
        t = student_t(len(x) - 2)
        half_b, half_log_a = t * float(line.stderr), t * float(line.intercept_stderr)
        a_interval = math.exp(intercept - half_log_a), math.exp(intercept + half_log_a)
        b_interval = slope - half_b, slope + half_b
    return PowerLaw(math.exp(intercept), slope, r2, len(x), min(x), max(x), a_interval, b_interval)


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


def curves(sweep: Sweep, views: Mapping[str, Column] = VIEWS) -> list[Curve]:
    """Return the series of a sweep with their fits, in the order of its rows. views: parameters first."""
    result = []
    for series in sweep.series:
        sizes = []
        for row in series.rows:
            numbers = [measure_column(row, column) for column in (*views.values(), sweep.first[1])]
            *x, loss = (0.0 if number is None else number.mean for number in numbers)
            if min(x[0], loss) > 0:
                sizes.append(Size(row, dict(zip(views, x, strict=True)), loss))
        sizes.sort(key=lambda size: size.x["parameters"])
        # of another dataset or optimizer, which have laws of their own
        is_mixed = len({size.x["parameters"] for size in sizes}) < len(sizes)
        laws: dict[str, PowerLaw | None] = {}
        for view in views:
            known = [(size.x[view], size.loss) for size in sizes if size.x[view] > 0]
            laws[view] = None if is_mixed else fit_power_law([x for x, _ in known], [loss for _, loss in known])
        result.append(Curve(series.key, series.name, sizes, laws))
    return result


def baseline_of(sweep: Sweep, fitted: Sequence[Curve]) -> Curve | None:
    """Return the baseline's curve, or None where the sweep has none."""
    return next((curve for curve in fitted if sweep.is_baseline_series(curve.series)), None)


def savings(sweep: Sweep, fitted: Sequence[Curve]) -> list[Saving]:
    """Return, for each size of every other series, what the baseline needs to reach its loss.

    By the baseline's law, log L falls by b for each unit of log x. So from its own size, the baseline reaches a loss
    whose log is lower by g with x times exp(g / b). The deviations of g are pooled over the sizes of a series.
    """
    baseline = baseline_of(sweep, fitted)
    if baseline is None:
        return []
    result = []
    for curve in fitted:
        pairs = [
            (size, reference)
            for size in curve.sizes
            for reference in baseline.sizes
            if curve is not baseline and sweep.reference_of(size.row) is reference.row
        ]
        log_ratios = pool_deviations(
            [difference(size.row, other.row, sweep.first[1], math.log) for size, other in pairs]
        )
        for (size, reference), log_ratio in zip(pairs, log_ratios, strict=True):
            # without a common seed, a ratio would mostly show the difference between the seeds
            if log_ratio is not None and log_ratio.count:
                luck = math.hypot(*(sweep.luck[each.row.label] / each.loss for each in (size, reference)))
                log_ratio = replace(log_ratio, luck=luck)
                needs = {
                    view: _factor_needed(law, size.x[view], reference.x[view], log_ratio)
                    for view, law in baseline.laws.items()
                }
                result.append(Saving(curve, size, reference, log_ratio, needs))
    return result


def _factor_needed(law: PowerLaw | None, x: float, reference: float, log_ratio: Measured) -> Needed | None:
    """Return the factor from the x of a size to the baseline's at the same loss; None if the law is not usable.

    reference: the x of the baseline's size, whose loss differs by log_ratio.
    """
    if law is None or law.b_interval is None or not law.usable or not x or not reference:
        return None
    needed = reference * _exp(log_ratio.mean / law.b)
    if not law.lowest / REACH <= needed <= law.highest * REACH:
        return None
    interval = None
    if (half_width := log_ratio.interval) is not None:
        ends = ratio_interval(log_ratio.mean, half_width, law.b, (law.b_interval[1] - law.b_interval[0]) / 2)
        if ends is None:
            return None
        interval = reference / x * _exp(ends[0]), reference / x * _exp(ends[1])
    # a value at the edge does not count as outside
    extrapolated = not law.lowest * (1 - 1e-9) <= needed <= law.highest * (1 + 1e-9)
    return Needed(needed / x, interval, extrapolated)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def paper_fit(sweep: Sweep, curve: Curve) -> tuple[float, float] | None:
    """Return the paper's a and b of a series, or None where it prints none."""
    values = sweep.experiment.fits.get(curve.series, [])
    return (values[0], values[1]) if len(values) == 2 else None


def fit_table(sweep: Sweep, fitted: Sequence[Curve]) -> Table:
    """Return the table of a, b and R² of each series, with 95% intervals, and the paper's a and b if it prints any."""
    papers = [paper_fit(sweep, curve) for curve in fitted]
    has_paper = any(fit is not None for fit in papers)
    rows = []
    for curve, paper in zip(fitted, papers, strict=True):
        law = curve.laws["compute"]
        # any two points are fitted exactly
        r2 = law.r2 if law is not None and law.points > 2 else None
        texts = [curve.name, str(len(curve.sizes)), *_law_texts(law), number_text(r2, 4)]
        if has_paper:
            texts += [DASH, DASH] if paper is None else [f"{value:g}" for value in paper]
        rows.append(cells(texts))
    head = ["", "points", "a", "b", "R²", *(["the paper's a", "the paper's b"] if has_paper else [])]
    return Table(head, rows, "L = a C^b, C in PFLOP/s-days")


def _law_texts(law: PowerLaw | None) -> list[str]:
    """Return a and b of a law with their intervals."""
    if law is None:
        return [DASH, DASH]
    a = "" if law.a_interval is None else f" [{law.a_interval[0]:.3g}, {law.a_interval[1]:.3g}]"
    b = "" if law.b_interval is None else f" [{', '.join(number_text(end, 4) for end in law.b_interval)}]"
    return [f"{law.a:.4g}{a}", f"{number_text(law.b, 4)}{b}"]


def savings_table(sweep: Sweep, fitted: Sequence[Curve], saved: Sequence[Saving]) -> Table | None:
    """Return the table of what the baseline needs to match the other series; None where nothing is comparable."""
    baseline = baseline_of(sweep, fitted)
    views = [view for view in (baseline.laws if baseline else ()) if any(entry.needs[view] for entry in saved)]
    if baseline is None or not views:
        return None
    digits = sweep.first[1].digits
    rows = []
    for entry in saved:
        size = entry.size
        facts = [size.row.label, count_text(size.x["parameters"]), number_text(size.loss, digits)]
        rows.append(cells([*facts, *(needed_text(entry.needs[view]) for view in views)]))
    head = ["", "parameters", "loss", *(NEEDS[view] for view in views)]
    return Table(head, rows, f"What {baseline.name} needs for the same loss")


def needed_text(needs: Needed | None) -> str:
    """Return a factor with its interval and a mark where it is extrapolated; a dash where the interval includes 1."""
    if needs is None or not needs.is_clear:
        return DASH
    return f"{needs}{' *' if needs.extrapolated else ''}"
