"""The scaling laws of each series, and what the baseline needs to reach the losses of the other series."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from depthlm.config.experiment import Column
from depthlm.report.rows import Measured, Row, difference, measured, pooled
from depthlm.report.scaling_laws.fits import REACH, Needed, PowerLaw, fit_power_law, ratio_interval
from depthlm.report.series import reference_of, series_names, series_of
from depthlm.report.sweep import Sweep

PFLOPS_DAY = 8.64e19

# what losses are compared at: the x of each law
VIEWS = {
    "parameters": Column(title="parameters", metric="parameters"),
    "compute": Column(title="training compute (PFLOP/s-days)", metric="training_flops", scale=PFLOPS_DAY),
}


@dataclass(frozen=True)
class Size:
    """A complete row of a series. x: its number in each view. loss: the first column's number, mean over seeds."""

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
class Gap:
    """The log of a row's loss over the baseline's, paired by seed."""

    size: Size
    reference: Size
    log_ratio: Measured


@dataclass(frozen=True)
class Saving:
    """What the baseline needs to reach the loss of one size of another series, in each view; None: unknown."""

    curve: Curve
    gap: Gap
    needs: dict[str, Needed | None]


def curves(sweep: Sweep, views: Mapping[str, Column] = VIEWS) -> list[Curve]:
    """Return the series of a sweep with their fits, in the order of its rows."""
    result = []
    for series, name in series_names(sweep.rows, sweep.experiment).items():
        members = [row for row in sweep.rows if series_of(row, sweep.experiment) == series]
        sizes = [size for row in members if (size := _size(row, sweep.first[1], views)) is not None]
        sizes.sort(key=lambda size: size.x["parameters"])
        loss = [size.loss for size in sizes]
        laws = {view: fit_power_law([size.x[view] for size in sizes], loss) for view in views}
        result.append(Curve(series, name, sizes, laws))
    return result


def _size(row: Row, column: Column, views: Mapping[str, Column]) -> Size | None:
    numbers: list[Measured | None] = [measured(row, of) for of in (*views.values(), column)]
    values = [number.mean for number in numbers if number is not None]
    if len(values) < len(numbers) or min(values) <= 0:
        return None
    return Size(row, dict(zip(views, values, strict=False)), values[-1])


def baseline_of(sweep: Sweep, fitted: Sequence[Curve]) -> Curve | None:
    """Return the baseline's curve, or None where the sweep has none."""
    return next((curve for curve in fitted if sweep.experiment.baseline in (curve.series, curve.name)), None)


def gaps(sweep: Sweep, curve: Curve, baseline: Curve) -> list[Gap]:
    """Return the gap of each size of a series to the baseline's row of the same task, with pooled deviations."""
    pairs = []
    for size in curve.sizes:
        row = reference_of(size.row, sweep.rows, sweep.experiment)
        reference = next((of for of in baseline.sizes if of.row is row), None)
        if reference is not None:
            pairs.append((size, reference))
    log_ratios = pooled([difference(size.row, other.row, sweep.first[1], math.log) for size, other in pairs])
    # without a common seed, a ratio would mostly show the difference between the seeds
    return [
        Gap(size, reference, log_ratio)
        for (size, reference), log_ratio in zip(pairs, log_ratios, strict=True)
        if log_ratio is not None and log_ratio.count
    ]


def savings(sweep: Sweep, fitted: Sequence[Curve]) -> list[Saving]:
    """Return, for each size of every other series, what the baseline needs to reach its loss.

    By the baseline's law, log L falls by b for each unit of log x. So from its own size, the baseline reaches a loss
    whose log is lower by g with x times exp(g / b).
    """
    baseline = baseline_of(sweep, fitted)
    if baseline is None:
        return []
    return [
        Saving(curve, gap, {view: _needed(law, gap, view) for view, law in baseline.laws.items()})
        for curve in fitted
        if curve is not baseline
        for gap in gaps(sweep, curve, baseline)
    ]


def _needed(law: PowerLaw | None, gap: Gap, view: str) -> Needed | None:
    """Return the factor between the size's own x and the baseline's at the same loss; None if the law is not usable."""
    if law is None or not law.usable:
        return None
    from_reference = gap.log_ratio.mean / law.b
    reference, own = gap.reference.x[view], gap.size.x[view]
    x = reference * _exp(from_reference)
    if not law.lowest / REACH <= x <= law.highest * REACH:
        return None
    interval = None
    half_width = gap.log_ratio.interval
    if half_width is not None and law.b_interval is not None:
        ends = ratio_interval(gap.log_ratio.mean, half_width, law.b, (law.b_interval[1] - law.b_interval[0]) / 2)
        if ends is None:
            return None
        interval = reference / own * _exp(ends[0]), reference / own * _exp(ends[1])
    # a value at the edge does not count as outside
    extrapolated = not law.lowest * (1 - 1e-9) <= x <= law.highest * (1 + 1e-9)
    return Needed(x / own, interval, extrapolated)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
