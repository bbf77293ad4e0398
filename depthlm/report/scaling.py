"""Scaling laws of each series, and how much smaller than the baseline's model of the same loss its models are."""

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
    """A series: its complete sizes, smallest first, and its laws of the loss over compute and over parameters."""

    series: str
    name: str
    sizes: list[Size]
    by_compute: PowerLaw | None
    by_parameters: PowerLaw | None


@dataclass(frozen=True)
class Saving:
    """What the baseline needs to reach the loss of one size of another series; None where its law cannot tell."""

    curve: Curve
    size: Size
    parameters: Needed | None
    compute: Needed | None

    @property
    def percent(self) -> float | None:
        """How many percent more parameters the baseline needs."""
        return None if self.parameters is None else 100 * (self.parameters.x / self.size.parameters - 1)

    @property
    def multiplier(self) -> float | None:
        """How many times the compute the baseline needs."""
        return None if self.compute is None else self.compute.x / self.size.compute


def curves(sweep: Sweep) -> list[Curve]:
    """The series of a sweep with their laws, in the order of its rows."""
    found = []
    for series, name in series_names(sweep.rows, sweep.experiment).items():
        members = [row for row in sweep.rows if series_of(row, sweep.experiment) == series]
        sizes = [size for row in members if (size := _size(row, sweep.first[1])) is not None]
        sizes.sort(key=lambda size: size.parameters)
        loss = [size.loss for size in sizes]
        by_compute = fit_power_law([size.compute for size in sizes], loss)
        by_parameters = fit_power_law([size.parameters for size in sizes], loss)
        found.append(Curve(series, name, sizes, by_compute, by_parameters))
    return found


def _size(row: Row, column: Column) -> Size | None:
    found: list[Measured | None] = [measured(row, of) for of in (PARAMETERS, COMPUTE, column)]
    values = [number.mean for number in found if number is not None]
    return Size(row, *values) if len(values) == len(found) and min(values) > 0 else None


def savings(sweep: Sweep, found: Sequence[Curve]) -> list[Saving]:
    """For each size of every other series, what the baseline needs to reach its loss."""
    baseline = baseline_of(sweep, found)
    if baseline is None:
        return []
    return [
        Saving(
            curve,
            size,
            None if baseline.by_parameters is None else needed(baseline.by_parameters, size.loss),
            None if baseline.by_compute is None else needed(baseline.by_compute, size.loss),
        )
        for curve in found
        if curve is not baseline
        for size in curve.sizes
    ]


def baseline_of(sweep: Sweep, found: Sequence[Curve]) -> Curve | None:
    """The baseline's curve, or None where the sweep has none."""
    return next((curve for curve in found if sweep.experiment.baseline in (curve.series, curve.name)), None)


def paper_fit(sweep: Sweep, curve: Curve) -> tuple[float, float] | None:
    """The paper's a and b of a series, or None where it prints none."""
    fits = sweep.experiment.fits
    found = fits.get(curve.series, fits.get(curve.name, []))
    return (found[0], found[1]) if len(found) == 2 else None


def fit_table(sweep: Sweep, found: Sequence[Curve]) -> Table:
    """a, b and R² of each series, the paper's a and b beside."""
    rows = []
    for curve in found:
        law, theirs = curve.by_compute, paper_fit(sweep, curve)
        # a law through two points fits them whatever they are
        r2 = law.r2 if law is not None and law.points > 2 else None
        ours = [DASH, DASH] if law is None else [short_text(law.a), number_text(law.b, 4)]
        told = [DASH, DASH] if theirs is None else [f"{value:g}" for value in theirs]
        rows.append(cells([curve.name, str(len(curve.sizes)), *ours, number_text(r2, 4), *told]))
    head = ["", "points", "a", "b", "R²", "the paper's a", "the paper's b"]
    return Table(head, rows, "L = a C^b, C in PFLOP/s-days")


def savings_table(sweep: Sweep, found: Sequence[Curve], saved: Sequence[Saving]) -> Table | None:
    """What the baseline needs to match each size of each other series; None where nothing is to be compared."""
    baseline = baseline_of(sweep, found)
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


def _mark(found: Needed) -> str:
    return " *" if found.extrapolated else ""


def remarks(sweep: Sweep, found: Sequence[Curve], saved: Sequence[Saving]) -> list[str]:
    """What the numbers of the fits do not say themselves: why some are missing, and which are extrapolated."""
    told = []
    for curve in found:
        compute = [size.compute for size in curve.sizes]
        if curve.by_compute is not None:
            if curve.by_compute.points == 2:
                told.append(f"{curve.name}: the fit goes through two points, so its quality cannot be told.")
        elif len(compute) < 2:
            told.append(f"{curve.name}: {_count(len(compute))}, and a fit needs two of different compute.")
        else:
            told.append(
                f"{curve.name}: no fit, since the compute of its {len(compute)} points differs by a factor of "
                f"{max(compute) / min(compute):.3g} only; it needs {SPAN:g}."
            )
    baseline = baseline_of(sweep, found)
    if baseline is None:
        told.append(f"No series is the baseline, {sweep.experiment.baseline}, so nothing is compared with it.")
        return told
    for law, what in ((baseline.by_parameters, "parameters"), (baseline.by_compute, "compute")):
        if law is not None and law.b >= 0:
            told.append(f"The loss of {baseline.name} does not fall with its {what}, so no saving of {what} is told.")
        elif law is None and saved:
            told.append(f"{baseline.name} has no fit over its {what}, so no saving of {what} is told.")
    marked = [needs for entry in saved for needs in (entry.parameters, entry.compute) if needs is not None]
    if any(needs.extrapolated for needs in marked):
        told.append(f"*: extrapolated beyond the sizes of {baseline.name}.")
    falls = [law is not None and law.b < 0 for law in (baseline.by_parameters, baseline.by_compute)]
    if any((entry.parameters is None and falls[0]) or (entry.compute is None and falls[1]) for entry in saved):
        told.append(f"{DASH}: more than ten times outside the sizes of {baseline.name}, where its fit says nothing.")
    return told


def _count(points: int) -> str:
    return "no point is complete" if points == 0 else "one point is complete"
