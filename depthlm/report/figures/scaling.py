"""The loss over compute and over parameters, with the fits of each series and what the baseline needs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from depthlm.report.figures.stamp import stamp_of
from depthlm.report.figures.style import (
    COLOURS,
    Look,
    grid,
    log_ticks,
    looks,
    mechanism_of,
    save,
    short,
    subplots,
)
from depthlm.report.fits import Needed, PowerLaw
from depthlm.report.rows import difference, measured
from depthlm.report.scaling import PARAMETERS, Curve, Saving, Size, baseline_of, paper_fit
from depthlm.report.series import reference_of, series_of
from depthlm.report.sweep import Sweep, title_of


def draw_scaling(sweep: Sweep, fitted_curves: Sequence[Curve], saved: Sequence[Saving], path: Path) -> list[str] | None:
    """Draw points and fits on logarithmic axes, and differences against the baseline; None where no point is complete.

    Returns the notes on the figure.
    """
    shown = [curve for curve in fitted_curves if curve.sizes]
    if not shown:
        return None
    styles = looks([mechanism_of(curve.sizes[0].row) for curve in shown])
    baseline = baseline_of(sweep, fitted_curves)
    apart = [[] if curve is baseline else _differences(sweep, curve) for curve in shown]
    panels = 3 if any(apart) else 2
    figure, (axes,) = subplots(panels, 5.7 * panels, 5)
    for curve, look in zip(shown, styles, strict=True):
        _draw(axes[0], curve, look, lambda size: size.compute, curve.by_compute)
        _draw(axes[1], curve, look, lambda size: size.parameters, curve.by_parameters)
    fitted = any(curve.by_compute or curve.by_parameters for curve in shown)
    notes = ["Dashed lines: the fits, each over its own points."] if fitted else []
    if sweep.as_printed and any(paper_fit(sweep, curve) for curve in shown):
        notes.append("Dotted lines, where visible: the paper's fits.")
        for curve, look in zip(shown, styles, strict=True):
            if (theirs := paper_fit(sweep, curve)) is not None:
                x = np.geomspace(curve.sizes[0].compute, curve.sizes[-1].compute, 2)
                axes[0].plot(x, theirs[0] * x ** theirs[1], ls=":", lw=1.3, color=look.colour)
    entry = widest(saved)
    if baseline is not None and entry is not None:
        size = entry.size
        _segment(axes[1], size.parameters, entry.parameters, size.loss, f"{entry.percent:+.1f}% parameters")
        if entry.multiplier is not None:
            _segment(axes[0], size.compute, entry.compute, size.loss, f"{entry.multiplier:.2f}x compute")
        notes.append(f"Black dashed segments: what {baseline.name} needs by its fit for the loss of {size.row.label}.")
    title = title_of(*sweep.first)
    losses = [size.loss for curve in shown for size in curve.sizes]
    _limit(axes[0], losses, "training compute (PFLOP/s-days)", title)
    _limit(axes[1], losses, "parameters", title)
    if any(apart):
        axes[2].set(xscale="log", xlim=axes[1].get_xlim())
        for points, look in zip(apart, styles, strict=True):
            if points:
                axes[2].errorbar(
                    *zip(*points, strict=True), color=look.colour, marker=look.marker, ms=7, lw=1.3, capsize=3
                )
        axes[2].axhline(0, color=COLOURS["vanilla"], lw=1.3)
        axes[2].set(xlabel="parameters", ylabel=f"{title},\ndifference against the baseline")
        log_ticks(axes[2].xaxis, axes[2].get_xlim(), counts=True)
        grid(axes[2])
        notes.append("The right panel compares runs of the same size and protocol.")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=min(7, len(shown)))
    for place, text in zip(axes, ("over compute", "over parameters", "against the baseline"), strict=False):
        place.set_title(text, fontsize="medium")
    save(figure, path, stamp_of(sweep))
    return notes


def widest(saved: Sequence[Saving]) -> Saving | None:
    """Return the saving to draw: the greatest at the largest size, among those not extrapolated if there are any."""
    positive = [entry for entry in saved if entry.percent is not None and entry.percent > 0]
    inside = [entry for entry in positive if entry.parameters is not None and not entry.parameters.extrapolated]
    return max(
        inside or positive, key=lambda entry: (round(np.log2(entry.size.parameters), 1), entry.percent), default=None
    )


def _draw(axes: Any, curve: Curve, look: Look, x_of: Callable[[Size], float], law: PowerLaw | None) -> None:
    x, y = [x_of(size) for size in curve.sizes], [size.loss for size in curve.sizes]
    axes.plot(x, y, look.marker, color=look.colour, ms=7, mec="white", mew=0.6, label=short(curve.name), zorder=3)
    if law is not None:
        ends = np.array([law.lowest, law.highest])
        axes.plot(ends, [law.at(end) for end in ends], color=look.colour, ls="--", lw=1.3)


def _differences(sweep: Sweep, curve: Curve) -> list[tuple[float, float, float]]:
    """Return each row's parameters, difference from the baseline's row, and its deviation; nan for missing rows."""
    points = []
    for row in sweep.rows:
        reference = reference_of(row, sweep.rows, sweep.experiment)
        if series_of(row, sweep.experiment) != curve.series or reference is None or reference is row:
            continue
        apart, parameters = difference(row, reference, sweep.first[1]), measured(row, PARAMETERS)
        if apart is None or parameters is None:
            points.append((np.nan, np.nan, np.nan))
        else:
            points.append((parameters.mean, apart.mean, apart.deviation or 0.0))
    return points if np.isfinite(points).any() else []


def _segment(axes: Any, start: float, needs: Needed | None, loss: float, text: str) -> None:
    if needs is None:
        return
    axes.plot([start, needs.x], [loss, loss], color="black", ls="--", lw=1.6, zorder=4)
    # there is space above and to the right of falling curves
    label = f"{text}, extrapolated" if needs.extrapolated else text
    axes.annotate(label, (max(start, needs.x), loss), xytext=(3, 9), textcoords="offset points", size=9)


def _limit(axes: Any, losses: Sequence[float], what: str, title: str) -> None:
    """Set logarithmic axes with a margin around the losses, independent of what else is drawn."""
    low, high = min(losses), max(losses)
    room = (high / low) ** 0.08 if high > low else 1.02
    axes.set(xscale="log", yscale="log", xlabel=what, ylabel=title, ylim=(low / room, high * room))
    axes.margins(x=0.08)
    log_ticks(axes.xaxis, axes.get_xlim(), counts=what == "parameters")
    log_ticks(axes.yaxis, axes.get_ylim())
    grid(axes)
