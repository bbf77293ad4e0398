"""The tables of scaling laws and of what the baseline needs, and remarks on missing numbers."""

from collections.abc import Sequence

from depthlm.counts import count_text
from depthlm.report.scaling_laws.curves import Curve, Saving, baseline_of
from depthlm.report.scaling_laws.fits import MIN_R2, REACH, SPAN, Needed, PowerLaw
from depthlm.report.sweep import Sweep
from depthlm.report.tables import DASH, Table, cells, number_text, short_text

NEEDS = {"parameters": "times the parameters", "compute": "times the compute", "time": "times the training time"}


def paper_fit(sweep: Sweep, curve: Curve) -> tuple[float, float] | None:
    """Return the paper's a and b of a series, or None where it prints none."""
    fits = sweep.experiment.fits
    values = fits.get(curve.series, fits.get(curve.name, []))
    return (values[0], values[1]) if len(values) == 2 else None


def fit_table(sweep: Sweep, fitted: Sequence[Curve]) -> Table:
    """Return the table of a, b and R² of each series, with 95% intervals, and the paper's a and b if it prints any."""
    has_printed = any(paper_fit(sweep, curve) is not None for curve in fitted)
    rows = []
    for curve in fitted:
        law, theirs = curve.laws["compute"], paper_fit(sweep, curve)
        # any two points are fitted exactly
        r2 = law.r2 if law is not None and law.points > 2 else None
        ours = [DASH, DASH] if law is None else [_a_text(law), _b_text(law)]
        printed = [DASH, DASH] if theirs is None else [f"{value:g}" for value in theirs]
        rows.append(
            cells([curve.name, str(len(curve.sizes)), *ours, number_text(r2, 4), *(printed if has_printed else [])])
        )
    head = ["", "points", "a", "b", "R²", *(["the paper's a", "the paper's b"] if has_printed else [])]
    return Table(head, rows, "L = a C^b, C in PFLOP/s-days")


def _a_text(law: PowerLaw) -> str:
    ends = "" if law.a_interval is None else f" [{', '.join(short_text(end, 3) for end in law.a_interval)}]"
    return f"{short_text(law.a)}{ends}"


def _b_text(law: PowerLaw) -> str:
    ends = "" if law.b_interval is None else f" [{', '.join(number_text(end, 4) for end in law.b_interval)}]"
    return f"{number_text(law.b, 4)}{ends}"


def savings_table(sweep: Sweep, fitted: Sequence[Curve], saved: Sequence[Saving]) -> Table | None:
    """Return the table of what the baseline needs to match the other series; None where nothing is comparable."""
    baseline = baseline_of(sweep, fitted)
    if baseline is None or all(needs is None for entry in saved for needs in entry.needs.values()):
        return None
    digits = sweep.first[1].digits
    rows = []
    for entry in saved:
        size = entry.gap.size
        facts = [size.row.label, count_text(size.x["parameters"]), number_text(size.loss, digits)]
        rows.append(cells([*facts, *(needed_text(needs) for needs in entry.needs.values())]))
    head = ["", "parameters", "loss", *(NEEDS[view] for view in baseline.laws)]
    return Table(head, rows, f"What {baseline.name} needs for the same loss")


def needed_text(needs: Needed | None) -> str:
    """Return a factor with its interval and a mark where it is extrapolated; a dash where the interval includes 1."""
    if needs is None or not needs.is_clear:
        return DASH
    return f"{factor_text(needs)}{' *' if needs.extrapolated else ''}"


def factor_text(needs: Needed) -> str:
    """Return a factor with its interval."""
    ends = "" if needs.interval is None else f" [{', '.join(_end_text(end) for end in needs.interval)}]"
    return f"{number_text(needs.factor, 2)}{ends}"


def _end_text(end: float) -> str:
    return number_text(end, 2) if end <= REACH else f"over {REACH:g}"


def remarks(sweep: Sweep, fitted: Sequence[Curve], saved: Sequence[Saving]) -> list[str]:
    """Return remarks on the fits: why some numbers are missing, and which are extrapolated."""
    lines = [line for curve in fitted if (line := _missing_fit(curve))]
    baseline = baseline_of(sweep, fitted)
    if baseline is None:
        lines.append(f"No series is the baseline, {sweep.experiment.baseline}, so there is no comparison with it.")
        return lines
    for view, law in baseline.laws.items():
        if law is not None and law.b >= 0:
            lines.append(f"The loss of {baseline.name} does not fall with its {view}, so no saving of {view} is given.")
        elif law is not None and law.points > 2 and not law.usable:
            lines.append(
                f"The fit of {baseline.name} over its {view} has an R² of {number_text(law.r2, 2)} and an exponent in "
                f"[{_b_text(law).partition('[')[2]}; a saving needs an R² of {MIN_R2:g} and an interval below 0, so no "
                f"saving of {view} is given."
            )
        elif law is None and saved:
            lines.append(f"{baseline.name} has no fit over its {view}, so no saving of {view} is given.")
    needs = [entry.needs[view] for entry in saved for view, law in baseline.laws.items() if law and law.usable]
    shown = [needed for needed in needs if needed is not None]
    if any(needed.interval is not None for needed in shown):
        lines.append(
            "Intervals are at 95%: of the differences paired by seed, whose variance is pooled over the sizes of a "
            f"series, and of the slope of {baseline.name}. They hold for each number alone: of twenty, one is expected "
            "to miss."
        )
    if any(needed.interval is None for needed in shown):
        lines.append("Factors without an interval are of one seed: how far chance goes is unknown.")
    if any(needed.extrapolated and needed.is_clear for needed in shown):
        lines.append(f"*: extrapolated beyond the sizes of {baseline.name}.")
    if any(needed is None or not needed.is_clear for needed in needs):
        lines.append(
            f"{DASH}: the interval includes 1 or has no end, or the loss is more than ten times outside the sizes of "
            f"{baseline.name}, where its fit is not used."
        )
    return lines


def _missing_fit(curve: Curve) -> str | None:
    law, compute = curve.laws["compute"], [size.x["compute"] for size in curve.sizes]
    if law is not None:
        through_two = f"{curve.name}: the fit goes through two points, so its quality is unknown."
        return through_two if law.points == 2 else None
    if len(compute) < 2:
        count = "no point is complete" if not compute else "one point is complete"
        return f"{curve.name}: {count}, and a fit needs two points of different compute."
    return (
        f"{curve.name}: no fit, since the compute of its {len(compute)} points differs only by a factor of "
        f"{max(compute) / min(compute):.3g}; a fit needs {SPAN:g}."
    )
