"""The loss in each view, such as over compute, with the fits of each series and what the baseline needs."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from depthlm.config.experiment import Column
from depthlm.report.figures.style import Style, mechanism_of, style_of
from depthlm.report.scaling_laws import NEEDS, VIEWS, Curve, Needed, Saving, baseline_of, paper_fit
from depthlm.report.sweep import Sweep
from depthlm.runs.plots import distinct, grid, legend_below, log_ticks, save, short

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
    styled = list(zip(shown, styles, strict=True))
    figure, places = _panels(list(views), with_differences=bool(saved))
    baseline = baseline_of(sweep, fitted_curves)
    for view, column in views.items():
        _draw_view(places[view], styled, view, column, baseline, widest(saved))
        places[view].set_ylabel(sweep.first[1].title or sweep.first[0])
    if sweep.as_printed:
        _draw_paper_fits(places["compute"], sweep, styled)
    if baseline is not None and saved:
        panel = places["differences"]
        _draw_differences(panel, styled, saved, baseline.name)
        panel.set_xlim(places["parameters"].get_xlim())
        log_ticks(panel.xaxis, panel.get_xlim(), counts=True)
    legend_below(figure, [places["parameters"]], columns=5)
    bars = f"; error bars: 95% intervals{sweep.luck_text}, without a correction for their number"
    save(figure, path, f"{sweep.stamp()}{bars if _has_bars(saved) else ''}", sweep.experiment.title)
    return _notes(sweep, shown, saved, baseline)


def _panels(views: Sequence[str], with_differences: bool) -> tuple[Any, dict[str, Any]]:
    """Return a figure and its panels by name: the differences large, with the views in a column beside them."""
    from matplotlib.figure import Figure

    if not with_differences:
        figure = Figure(figsize=(5.7 * len(views), 4.8), layout="constrained")
        return figure, figure.subplot_mosaic([list(views)])
    height = max(6.4, 3.1 * len(views))
    figure = Figure(figsize=(12.5, height), layout="constrained")
    return figure, figure.subplot_mosaic([["differences", view] for view in views], width_ratios=[1.8, 1])


def _has_bars(saved: Sequence[Saving]) -> bool:
    return any(entry.log_ratio.interval is not None for entry in saved)


def _notes(sweep: Sweep, shown: Sequence[Curve], saved: Sequence[Saving], baseline: Curve | None) -> list[str]:
    notes = []
    if any(law is not None and law.usable for curve in shown for law in curve.laws.values()):
        notes.append("Dashed lines: the fits with R² of at least 0.9, each over its own points.")
    if sweep.as_printed and any(paper_fit(sweep, curve) for curve in shown):
        notes.append("Dotted lines, where visible: the paper's fits.")
    if baseline is None or not saved:
        return notes
    if (entry := widest(saved)) is not None:
        notes.append(
            f"Black dashed segments: what {baseline.name} needs, by the slope of its fit, for the loss of "
            f"{entry.size.row.label}."
        )
    notes.append(f"The large panel compares runs of one size, protocol and seed with {baseline.name}.")
    if _has_bars(saved):
        notes.append("Its bars are 95% intervals, from the variance between seeds pooled over the sizes.")
    return notes


def widest(saved: Sequence[Saving]) -> Saving | None:
    """Return the saving to draw: the greatest at the largest size within the sizes of the baseline."""
    visible = [
        (round(math.log2(entry.reference.x["parameters"]), 1), n.factor, entry)
        for entry in saved
        if (n := entry.needs["parameters"]) is not None and n.is_clear and not n.extrapolated and n.factor > VISIBLE
    ]
    return max(visible, key=lambda one: one[:2])[2] if visible else None


def _draw_view(
    axes: Any,
    styled: Sequence[tuple[Curve, Style]],
    view: str,
    column: Column,
    baseline: Curve | None,
    entry: Saving | None,
) -> None:
    """Draw the points and fits of all series in one view. entry: a saving to draw as a segment."""
    for (curve, style), name in zip(styled, distinct([curve.name for curve, _ in styled]), strict=True):
        # the baseline's few points must not lie below those of all others
        order = 4 if curve is baseline else 3
        x, y = [size.x[view] for size in curve.sizes], [size.loss for size in curve.sizes]
        look = {"color": style.colour, "ms": 7, "mec": "white", "mew": 0.6, "zorder": order}
        axes.plot(x, y, style.marker, label=name, **look)
        law = curve.laws[view]
        if law is not None and law.usable:
            ends = np.array([law.lowest, law.highest])
            axes.plot(ends, [law.at(end) for end in ends], color=style.colour, ls="--", lw=1.3)
    _limit(axes, [size.loss for curve, _ in styled for size in curve.sizes], counts=view == "parameters")
    axes.set_xlabel(column.title)
    axes.set_title(f"loss over {column.title.partition(' (')[0]}", fontsize="medium")
    if entry is not None and (needs := entry.needs[view]) is not None and needs.is_clear and not needs.extrapolated:
        text = f"{short(entry.curve.name)}: {needs}\n{NEEDS[view]}"
        _draw_segment(axes, entry.size.x[view], needs, entry.size.loss, text)


def _draw_segment(axes: Any, start: float, needs: Needed, loss: float, text: str) -> None:
    end = start * needs.factor
    axes.plot([start, end], [loss, loss], color="black", ls="--", lw=1.6, zorder=4)
    # there is space below and to the left of falling curves
    axes.annotate(
        text, (max(start, end), loss), xytext=(0, -9), textcoords="offset points", size=8, ha="right", va="top"
    )


def _draw_paper_fits(axes: Any, sweep: Sweep, styled: Sequence[tuple[Curve, Style]]) -> None:
    """Draw the paper's fits over the compute of our points."""
    for curve, style in styled:
        if (fit := paper_fit(sweep, curve)) is not None:
            x = np.geomspace(curve.sizes[0].x["compute"], curve.sizes[-1].x["compute"], 2)
            axes.plot(x, fit[0] * x ** fit[1], ls=":", lw=1.3, color=style.colour)


def _draw_differences(axes: Any, styled: Sequence[tuple[Curve, Style]], saved: Sequence[Saving], baseline: str) -> None:
    """Draw the differences in percent over the parameters; error bars of several series lie side by side."""
    for number, (curve, style) in enumerate(styled):
        entries = [entry for entry in saved if entry.curve is curve]
        shift = 1 + 0.015 * (number - len(styled) / 2)
        means, lows, highs = (
            np.array([100 * math.expm1(e.log_ratio.mean + side * (e.log_ratio.interval or 0)) for e in entries])
            for side in (0, -1, 1)
        )
        if entries:
            x = [shift * entry.reference.x["parameters"] for entry in entries]
            look = {"color": style.colour, "marker": style.marker, "ms": 7, "lw": 1.3, "capsize": 3}
            axes.errorbar(x, means, [means - lows, highs - means], **look)
    axes.axhline(0, color="0.3", lw=1.3)
    axes.set(xscale="log", xlabel=f"parameters of {baseline}", ylabel=f"difference in loss from {baseline} (%)")
    axes.set_title(f"the same size, against {baseline}", fontsize="medium")
    grid(axes)


def _limit(axes: Any, losses: Sequence[float], counts: bool) -> None:
    """Set logarithmic axes with a margin around the losses, independent of what else is drawn."""
    low, high = min(losses), max(losses)
    room = (high / low) ** 0.08 if high > low else 1.02
    # below, there is space for the two lines of a label
    axes.set(xscale="log", yscale="log", ylim=(low / room**3.4, high * room))
    axes.margins(x=0.08)
    log_ticks(axes.xaxis, axes.get_xlim(), counts=counts)
    log_ticks(axes.yaxis, axes.get_ylim())
    grid(axes)
