"""A bar chart of the rows: differences against the baseline, ours next to the paper's."""

from pathlib import Path
from typing import Any

from depthlm.report.figures.style import grid, mechanism_of, save, short, subplots
from depthlm.report.sweep import Difference, Sweep, references_text, title_of
from depthlm.report.tables import signed_text

HEIGHT = 0.36


def draw_bars(sweep: Sweep, path: Path) -> list[str] | None:
    """Draw the first column of each row as a difference against the baseline's; None where there is none to draw.

    Returns the notes on the figure.
    """
    name, column = sweep.first
    bars = [entry for entry in sweep.differences() if entry.reference is not None]
    if all(bar.ours is None and bar.paper is None for bar in bars):
        return None
    with_paper = any(bar.paper is not None for bar in bars)
    figure, ((axes,),) = subplots(1, 8, 1.6 + (0.62 if with_paper else 0.42) * len(bars))
    for number, bar in enumerate(bars):
        _draw(axes, bar, number, with_paper, column.digits)
    axes.axvline(0, color="black", lw=1)
    axes.set_yticks(range(len(bars)), [short(bar.row.label, 36) for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.margins(x=0.16)
    against = references_text(bars)
    axes.set_xlabel(f"{title_of(name, column)}: difference against {against} ({column.better} is better)")
    grid(axes, "x")
    if with_paper:
        _legend(axes)
    save(figure, path, sweep.stamp(beside_paper=with_paper))
    if all(bar.ours is None or bar.ours.interval is None for bar in bars):
        return []
    return ["Error bars: 95% intervals over seeds, of differences paired by seed."]


def _draw(axes: Any, bar: Difference, place: float, with_paper: bool, digits: int) -> None:
    colour = mechanism_of(bar.row.points[0]).colour
    above = place - HEIGHT / 2 if with_paper else place
    if bar.ours is None:
        axes.annotate(
            "missing", (0, above), xytext=(4, 0), textcoords="offset points", va="center", color="grey", size=8
        )
    else:
        axes.barh(above, bar.ours.mean, HEIGHT, color=colour, xerr=bar.ours.interval, capsize=3, ecolor="black")
        _label(axes, bar.ours.mean, above, digits, bar.ours.interval or 0)
    if bar.paper is not None:
        below = place + HEIGHT / 2
        axes.barh(below, bar.paper, HEIGHT, color="white", edgecolor=colour, hatch="////", lw=1.2)
        _label(axes, bar.paper, below, digits, 0)


def _label(axes: Any, value: float, place: float, digits: int, beyond: float) -> None:
    side = 1 if value >= 0 else -1
    axes.annotate(
        signed_text(value, digits),
        (value + side * beyond, place),
        xytext=(4 * side, 0),
        textcoords="offset points",
        va="center",
        ha="left" if side > 0 else "right",
        size=8,
    )


def _legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor="#777777", label="ours"),
        Patch(facecolor="white", edgecolor="#777777", hatch="////", label="the paper's"),
    ]
    axes.legend(handles=handles, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
