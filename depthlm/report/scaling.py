"""The scaling laws of each series, and what the baseline needs to reach the losses of the other series."""

from collections.abc import Sequence
from dataclasses import dataclass

from depthlm.config.schema.experiment import Column
from depthlm.counts import count_text
from depthlm.report.fits import SPAN, Needed, PowerLaw, fit_power_law, needed
from depthlm.report.rows import Measured, Row, measured
from depthlm.report.series import series_names, series_of
from depthlm.report.sweep import Sweep
from depthlm.report.tables import DASH, Table, cells, number_text, short_text

PFLOPS_DAY = 8.64e19

COMPUTE = Column(metric="training_flops", scale=PFLOPS_DAY)
PARAMETERS = Column(metric="parameters")


@dataclass(frozen=True)
class Size:
    """A complete row of a series. compute: PFLOP/s-days. loss: the first column's number, mean over seeds."""

    row: Row
    parameters: float
    compute: float
    loss: float


@dataclass(frozen=True)
class Curve:
    """A series: its complete sizes, smallest first, and its fits of the loss over compute and over parameters."""

    series: str
    name: str
    sizes: list[Size]
    by_compute: PowerLaw | None
    by_parameters: PowerLaw | None


@dataclass(frozen=True)
class Saving:
    """What the baseline needs to reach the loss of one size of another series; None where its fit is not usable."""

    curve: Curve
    size: Size
    parameters: Needed | None
    compute: Needed | None

    @property
    def percent(self) -> float | None:
        """The additional parameters that the baseline needs, in percent."""
        return None if self.parameters is None else 100 * (self.parameters.x / self.size.parameters - 1)

    @property
    def multiplier(self) -> float | None:
        """The compute that the baseline needs, as a multiple."""
        return None if self.compute is None else self.compute.x / self.size.compute


def curves(sweep: Sweep) -> list[Curve]:
    """Return the series of a sweep with their fits, in the order of its rows."""
    result = []
    for series, name in series_names(sweep.rows, sweep.experiment).items():
        members = [row for row in sweep.rows if series_of(row, sweep.experiment) == series]
        sizes = [size for row in members if (size := _size(row, sweep.first[1])) is not None]
        sizes.sort(key=lambda size: size.parameters)
        loss = [size.loss for size in sizes]
        by_compute = fit_power_law([size.compute for size in sizes], loss)
        by_parameters = fit_power_law([size.parameters for size in sizes], loss)
        result.append(Curve(series, name, sizes, by_compute, by_parameters))
    return result


def _size(row: Row, column: Column) -> Size | None:
    numbers: list[Measured | None] = [measured(row, of) for of in (PARAMETERS, COMPUTE, column)]
    values = [number.mean for number in numbers if number is not None]
    return Size(row, *values) if len(values) == len(numbers) and min(values) > 0 else None


def savings(sweep: Sweep, fitted: Sequence[Curve]) -> list[Saving]:
    """Return, for each size of every other series, what the baseline needs to reach its loss."""
    baseline = baseline_of(sweep, fitted)
    if baseline is None:
        return []
    return [
        Saving(
            curve,
            size,
            None if baseline.by_parameters is None else needed(baseline.by_parameters, size.loss),
            None if baseline.by_compute is None else needed(baseline.by_compute, size.loss),
        )
        for curve in fitted
        if curve is not baseline
        for size in curve.sizes
    ]


def baseline_of(sweep: Sweep, fitted: Sequence[Curve]) -> Curve | None:
    """Return the baseline's curve, or None where the sweep has none."""
    return next((curve for curve in fitted if sweep.experiment.baseline in (curve.series, curve.name)), None)


def paper_fit(sweep: Sweep, curve: Curve) -> tuple[float, float] | None:
    """Return the paper's a and b of a series, or None where it prints none."""
    fits = sweep.experiment.fits
    values = fits.get(curve.series, fits.get(curve.name, []))
    return (values[0], values[1]) if len(values) == 2 else None


def fit_table(sweep: Sweep, fitted: Sequence[Curve]) -> Table:
    """Return the table of a, b and R² of each series, next to the paper's a and b."""
    rows = []
    for curve in fitted:
        law, theirs = curve.by_compute, paper_fit(sweep, curve)
        # any two points are fitted exactly
        r2 = law.r2 if law is not None and law.points > 2 else None
        ours = [DASH, DASH] if law is None else [short_text(law.a), number_text(law.b, 4)]
        printed = [DASH, DASH] if theirs is None else [f"{value:g}" for value in theirs]
        rows.append(cells([curve.name, str(len(curve.sizes)), *ours, number_text(r2, 4), *printed]))
    head = ["", "points", "a", "b", "R²", "the paper's a", "the paper's b"]
    return Table(head, rows, "L = a C^b, C in PFLOP/s-days")


def savings_table(sweep: Sweep, fitted: Sequence[Curve], saved: Sequence[Saving]) -> Table | None:
    """Return the table of what the baseline needs to match the other series; None where nothing is comparable."""
    baseline = baseline_of(sweep, fitted)
    if baseline is None or all(entry.parameters is None and entry.compute is None for entry in saved):
        return None
    digits = sweep.first[1].digits
    rows = []
    for entry in saved:
        n, c = entry.parameters, entry.compute
        rows.append(
            cells(
                [
                    entry.size.row.label,
                    count_text(entry.size.parameters),
                    number_text(entry.size.loss, digits),
                    DASH if n is None else f"{count_text(n.x)}{_mark(n)}",
                    DASH if n is None or entry.percent is None else f"{entry.percent:+.1f}%{_mark(n)}",
                    DASH if c is None or entry.multiplier is None else f"{entry.multiplier:.3f}{_mark(c)}",
                ]
            )
        )
    head = ["", "parameters", "loss", f"{baseline.name} needs", "more parameters", "times the compute"]
    return Table(head, rows, f"What {baseline.name} needs for the same loss")


def _mark(needs: Needed) -> str:
    return " *" if needs.extrapolated else ""


def remarks(sweep: Sweep, fitted: Sequence[Curve], saved: Sequence[Saving]) -> list[str]:
    """Return remarks on the fits: why some numbers are missing, and which are extrapolated."""
    lines = []
    for curve in fitted:
        compute = [size.compute for size in curve.sizes]
        if curve.by_compute is not None:
            if curve.by_compute.points == 2:
                lines.append(f"{curve.name}: the fit goes through two points, so its quality is unknown.")
        elif len(compute) < 2:
            lines.append(f"{curve.name}: {_count(len(compute))}, and a fit needs two points of different compute.")
        else:
            lines.append(
                f"{curve.name}: no fit, since the compute of its {len(compute)} points differs only by a factor "
                f"of {max(compute) / min(compute):.3g}; a fit needs {SPAN:g}."
            )
    baseline = baseline_of(sweep, fitted)
    if baseline is None:
        lines.append(f"No series is the baseline, {sweep.experiment.baseline}, so there is no comparison with it.")
        return lines
    for law, what in ((baseline.by_parameters, "parameters"), (baseline.by_compute, "compute")):
        if law is not None and law.b >= 0:
            lines.append(f"The loss of {baseline.name} does not fall with its {what}, so no saving of {what} is given.")
        elif law is None and saved:
            lines.append(f"{baseline.name} has no fit over its {what}, so no saving of {what} is given.")
    marked = [needs for entry in saved for needs in (entry.parameters, entry.compute) if needs is not None]
    if any(needs.extrapolated for needs in marked):
        lines.append(f"*: extrapolated beyond the sizes of {baseline.name}.")
    falls = [law is not None and law.b < 0 for law in (baseline.by_parameters, baseline.by_compute)]
    if any((entry.parameters is None and falls[0]) or (entry.compute is None and falls[1]) for entry in saved):
        lines.append(f"{DASH}: more than ten times outside the sizes of {baseline.name}, where its fit is not used.")
    return lines


def _count(points: int) -> str:
    return "no point is complete" if points == 0 else "one point is complete"
