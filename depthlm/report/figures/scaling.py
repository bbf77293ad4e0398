"""The loss in each view, such as over compute, with the fits of each series and what the baseline needs."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from depthlm.config.experiment import Column
from depthlm.report.figures.stamp import stamp_of
from depthlm.report.figures.style import Style, grid, log_ticks, save, short, style_of, subplots
from depthlm.report.mechanism import mechanism_of
from depthlm.report.scaling_laws import (
    NEEDS,
    VIEWS,
    Curve,
    Gap,
    Needed,
    Saving,
    baseline_of,
    factor_text,
    gaps,
    paper_fit,
)
from depthlm.report.sweep import Sweep, title_of

# the smallest factor that is drawn as a segment, which is then longer than a marker
VISIBLE = 1.1


def draw_scaling(
    sweep: Sweep,
    fitted_curves: Sequence[Curve],
    saved: Sequence[Saving],
    path: Path,
    views: Mapping[str, Column] = VIEWS,
) -> list[str] | None:
    """Draw points and fits on logarithmic axes, a panel per view, and the differences against the baseline.

    Returns the notes on the figure; None where no point is complete.
    """
    shown = [curve for curve in fitted_curves if curve.sizes]
    if not shown:
        return None
    styles = style_of([mechanism_of(curve.sizes[0].row) for curve in shown])
    baseline = baseline_of(sweep, fitted_curves)
    apart = {} if baseline is None else {c.series: gaps(sweep, c, baseline) for c in shown if c is not baseline}
    panels = len(views) + any(apart.values())
    columns = 2 if panels == 4 else panels
    figure, axes = subplots(columns, 5.7 * columns, 4.8 * math.ceil(panels / columns), math.ceil(panels / columns))
    places = dict(zip([*views, "differences"], axes.flat, strict=False))
    losses, title = [size.loss for curve in shown for size in curve.sizes], title_of(*sweep.first)
    entry = widest(saved)
    for view, column in views.items():
        for curve, style in zip(shown, styles, strict=True):
            # the baseline's few points must not lie below those of all others
            _draw(places[view], curve, style, view, 4 if curve is baseline else 3)
        _limit(places[view], losses, column.title, title, counts=view == "parameters")
        places[view].set_title(f"loss over {column.title.split(' (')[0]}", fontsize="medium")
        if entry is not None and (needs := entry.needs[view]) is not None and needs.is_clear:
            text = f"{short(entry.curve.name)}: {factor_text(needs)}\n{NEEDS[view]}"
            _segment(places[view], entry.gap.size.x[view], needs, entry.gap.size.loss, text)
    notes, bars = [], ""
    if any(law is not None and law.usable for curve in shown for law in curve.laws.values()):
        notes.append("Dashed lines: the fits with R² of at least 0.9, each over its own points.")
    if sweep.as_printed and any(paper_fit(sweep, curve) for curve in shown):
        notes.append("Dotted lines, where visible: the paper's fits.")
        for curve, style in zip(shown, styles, strict=True):
            if (theirs := paper_fit(sweep, curve)) is not None:
                x = np.geomspace(curve.sizes[0].x["compute"], curve.sizes[-1].x["compute"], 2)
                places["compute"].plot(x, theirs[0] * x ** theirs[1], ls=":", lw=1.3, color=style.colour)
    if baseline is not None and entry is not None:
        notes.append(
            f"Black dashed segments: what {baseline.name} needs, by the slope of its fit, for the loss of "
            f"{entry.gap.size.row.label}."
        )
    if baseline is not None and any(apart.values()):
        panel = places["differences"]
        for number, (curve, style) in enumerate(zip(shown, styles, strict=True)):
            _draw_gaps(panel, apart.get(curve.series, []), style, 1 + 0.015 * (number - len(shown) / 2))
        panel.axhline(0, color="0.3", lw=1.3)
        panel.set(xscale="log", xlim=places["parameters"].get_xlim())
        panel.set(xlabel=f"parameters of {baseline.name}", ylabel=f"difference in loss from {baseline.name} (%)")
        panel.set_title(f"the same size, against {baseline.name}", fontsize="medium")
        log_ticks(panel.xaxis, panel.get_xlim(), counts=True)
        grid(panel)
        notes.append(f"The last panel compares runs of one size, protocol and seed with {baseline.name}.")
        if any(gap.log_ratio.interval is not None for of in apart.values() for gap in of):
            notes.append("Its bars are 95% intervals, from the variance between seeds pooled over the sizes.")
            bars = "; error bars: 95% intervals"
    handles, labels = places["parameters"].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=min(5, len(shown)))
    save(figure, path, f"{stamp_of(sweep)}{bars}")
    return notes


def widest(saved: Sequence[Saving]) -> Saving | None:
    """Return the saving to draw: the greatest at the largest size, among those not extrapolated if there are any."""

    def clear(entry: Saving) -> Needed | None:
        needs = entry.needs["parameters"]
        return needs if needs is not None and needs.is_clear and needs.factor > VISIBLE else None

    positive = [(entry, needs) for entry in saved if (needs := clear(entry)) is not None]
    inside = [pair for pair in positive if not pair[1].extrapolated]

    def order(pair: tuple[Saving, Needed]) -> tuple[float, float]:
        return round(math.log2(pair[0].gap.reference.x["parameters"]), 1), pair[1].factor

    return max(inside or positive, key=order)[0] if positive else None


def _draw(axes: Any, curve: Curve, style: Style, view: str, order: float) -> None:
    x, y = [size.x[view] for size in curve.sizes], [size.loss for size in curve.sizes]
    axes.plot(x, y, style.marker, color=style.colour, ms=7, mec="white", mew=0.6, label=short(curve.name), zorder=order)
    law = curve.laws[view]
    if law is not None and law.usable:
        ends = np.array([law.lowest, law.highest])
        axes.plot(ends, [law.at(end) for end in ends], color=style.colour, ls="--", lw=1.3)


def _draw_gaps(axes: Any, of: Sequence[Gap], style: Style, shift: float) -> None:
    """Draw a series. shift: a factor of the parameters, so that the error bars of several series lie side by side."""
    if of:
        means, lows, highs = (
            [100 * math.expm1(gap.log_ratio.mean + side * (gap.log_ratio.interval or 0)) for gap in of]
            for side in (0, -1, 1)
        )
        axes.errorbar(
            [shift * gap.reference.x["parameters"] for gap in of],
            means,
            np.abs([[mean - end for mean, end in zip(means, ends, strict=True)] for ends in (lows, highs)]),
            color=style.colour,
            marker=style.marker,
            ms=7,
            lw=1.3,
            capsize=3,
        )


def _segment(axes: Any, start: float, needs: Needed, loss: float, text: str) -> None:
    end = start * needs.factor
    axes.plot([start, end], [loss, loss], color="black", ls="--", lw=1.6, zorder=4)
    # there is space below and to the left of falling curves
    label = f"{text}, extrapolated" if needs.extrapolated else text
    axes.annotate(
        label, (max(start, end), loss), xytext=(0, -9), textcoords="offset points", size=9, ha="right", va="top"
    )


def _limit(axes: Any, losses: Sequence[float], what: str, title: str, counts: bool) -> None:
    """Set logarithmic axes with a margin around the losses, independent of what else is drawn."""
    low, high = min(losses), max(losses)
    room = (high / low) ** 0.08 if high > low else 1.02
    # below, there is space for the two lines of a label
    axes.set(xscale="log", yscale="log", xlabel=what, ylabel=title, ylim=(low / room**1.8, high * room))
    axes.margins(x=0.08)
    log_ticks(axes.xaxis, axes.get_xlim(), counts=counts)
    log_ticks(axes.yaxis, axes.get_ylim())
    grid(axes)
