"""A line chart of the first column over a setting or a number: one line per series, hollow markers for the paper."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthlm.report.figures.axis import axis_title, is_setting, ordered, paper_place, place, setting
from depthlm.report.figures.stamp import stamp_of
from depthlm.report.figures.style import Style, grid, log_ticks, save, short, style_of, subplots
from depthlm.report.mechanism import mechanism_of
from depthlm.report.rows import Row, measured, paper
from depthlm.report.series import series_names, series_of
from depthlm.report.sweep import Sweep, title_of

# a numeric axis that spans more than this factor becomes logarithmic, and so does one with a constant factor between
# its numbers
LOGARITHMIC = 6
PAPER = ", the paper's"


@dataclass(frozen=True)
class Mark:
    """A number at x, and half the width of its 95% interval over seeds; where y is nan, the line has a gap.

    x is None where the row lacks the setting, so that its number holds for the whole axis, or where x is unknown.
    """

    x: float | str | None
    y: float
    interval: float | None = None


@dataclass(frozen=True)
class Line:
    """A series along the axis: ours, or the paper's (hollow)."""

    name: str
    style: Style
    marks: list[Mark]
    hollow: bool


def draw_lines(sweep: Sweep, path: Path) -> list[str] | None:
    """Draw the first column along the experiment's x; None where there is nothing to draw.

    Where the protocol is not the paper's, the paper's numbers are in a separate panel. Returns notes on the figure.
    """
    ours, theirs = _lines(sweep, hollow=False), _lines(sweep, hollow=True)
    if not ours and not theirs:
        return None
    # on one axis only if they are comparable
    panels = [ours + theirs] if sweep.as_printed else [lines for lines in (ours, theirs) if lines]
    figure, axes = subplots(len(panels), 7.5 if len(panels) == 1 else 12, 5)
    name, column = sweep.first
    for panel, lines in zip(axes[0], panels, strict=True):
        _draw(panel, lines, sweep)
        panel.set_xlabel(axis_title(sweep.experiment.x))
        panel.set_ylabel(f"{title_of(name, column)} ({column.better} is better)")
        if len(panels) > 1:
            panel.set_title("the paper's" if lines[0].hollow else "ours")
    _legend(figure, axes[0])
    save(figure, path, stamp_of(sweep, beside_paper=bool(theirs)))
    notes = ["Hollow markers: the paper's numbers."] if theirs else []
    if any(mark.interval is not None for line in ours for mark in line.marks):
        notes.append("Error bars: 95% intervals over seeds.")
    notes.append("Lines are broken where a number is missing.")
    unplaced = sum(paper(row, name) is not None and not math.isfinite(_mark(sweep, row, True).y) for row in sweep.rows)
    if unplaced:
        notes.append(f"{unplaced} of the paper's numbers are not drawn: their position on the axis is unknown.")
    return notes


def _lines(sweep: Sweep, hollow: bool) -> list[Line]:
    names = series_names(sweep.rows, sweep.experiment)
    members = {key: [row for row in sweep.rows if series_of(row, sweep.experiment) == key] for key in names}
    styles = style_of([mechanism_of(rows[0]) for rows in members.values()])
    lines = []
    for (key, rows), style in zip(members.items(), styles, strict=True):
        marks = [_mark(sweep, row, hollow) for row in rows]
        if any(math.isfinite(mark.y) for mark in marks):
            lines.append(Line(names[key], style, marks, hollow))
    return lines


def _mark(sweep: Sweep, row: Row, hollow: bool) -> Mark:
    """Return the mark of a row; y is nan where the row has no number or no position on the axis."""
    name, column = sweep.first
    x = (paper_place if hollow else place)(sweep, row, sweep.experiment.x)
    ours, theirs = measured(row, column), paper(row, name)
    if x is None and not is_setting(sweep, sweep.experiment.x):
        return Mark(None, math.nan)
    if hollow:
        return Mark(x, math.nan if theirs is None else theirs)
    return Mark(x, math.nan) if ours is None else Mark(x, ours.mean, ours.interval)


def _draw(axes: Any, lines: Sequence[Line], sweep: Sweep) -> None:
    exact = is_setting(sweep, sweep.experiment.x)
    order = ordered([value for row in sweep.rows if (value := setting(row, sweep.experiment.x)) is not None])
    words = any(isinstance(mark.x, str) for line in lines for mark in line.marks)
    positions = [_points(line.marks, order, exact) for line in lines]
    seen = [x for points in positions for x, _ in points if math.isfinite(x)]
    logarithmic = not words and _is_logarithmic(seen)
    shifts = _shifts(lines, seen, logarithmic)
    for line, points, shift in zip(lines, positions, shifts, strict=True):
        of = line.style
        style: dict[str, Any] = {"color": of.colour, "marker": of.marker, "ms": 7, "ls": of.dash, "lw": 1.5}
        if line.hollow:
            style |= {"mfc": "white", "mew": 1.4, "lw": 0.9, "alpha": 0.9}
        label = f"{short(line.name)}{PAPER}" if line.hollow else short(line.name)
        if any(math.isfinite(mark.y) for _, mark in points):
            x = [x * math.exp(shift) if logarithmic else x + shift for x, _ in points]
            y = [mark.y for _, mark in points]
            intervals = [mark.interval or 0 for _, mark in points]
            axes.errorbar(x, y, intervals if any(intervals) else None, capsize=3, label=label, **style)
        for mark in line.marks:
            if mark.x is None and math.isfinite(mark.y):
                axes.axhline(mark.y, color=of.colour, ls=":" if line.hollow else "--", lw=1.3, label=label)
    if words:
        axes.set_xticks(range(len(order)), [short(word, 20) for word in order])
        axes.set_xlim(-0.4, len(order) - 0.6)
    elif seen:
        _scale(axes, seen, exact)
    grid(axes)


def _points(marks: Sequence[Mark], order: Sequence[str], exact: bool) -> list[tuple[float, Mark]]:
    """Return the marks with their positions, from left to right where all are known; text values keep their order."""
    points = []
    for mark in marks:
        if isinstance(mark.x, str):
            points.append((float(order.index(mark.x)), mark))
        elif mark.x is not None:
            points.append((mark.x, mark))
        elif not exact:
            # a gap at an unknown position still breaks the line
            points.append((math.nan, mark))
    return sorted(points, key=lambda point: point[0]) if exact else points


def _is_logarithmic(numbers: Sequence[float]) -> bool:
    """Return whether an axis of these numbers is logarithmic."""
    places = sorted(set(numbers))
    if not places or places[0] <= 0:
        return False
    factors = [right / left for left, right in itertools.pairwise(places)]
    is_geometric = len(factors) > 1 and max(factors) < 1.01 * min(factors)
    return is_geometric or LOGARITHMIC * places[0] < places[-1]


def _shifts(lines: Sequence[Line], positions: Sequence[float], logarithmic: bool) -> list[float]:
    """Return how far each line is moved along the axis, so that the error bars of several lie side by side."""
    ours = [line for line in lines if not line.hollow and any(mark.interval for mark in line.marks)]
    places = sorted({math.log(x) if logarithmic else x for x in positions})
    gap = min((right - left for left, right in itertools.pairwise(places)), default=0.0)
    # all of them within a third of the gap
    return [gap / 3 * ((ours.index(line) + 0.5) / len(ours) - 0.5) if line in ours else 0.0 for line in lines]


def _legend(figure: Any, panels: Sequence[Any]) -> None:
    """Draw one legend for all panels, below them, with ours above the paper's."""
    shown: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    # matplotlib fills a legend column by column
    names = list(dict.fromkeys(label.removesuffix(PAPER) for label in shown))
    labels = sorted(shown, key=lambda label: (names.index(label.removesuffix(PAPER)), label))
    ours = sum(not label.endswith(PAPER) for label in labels)
    for columns in range(min(4, max(1, ours, len(labels) - ours)), 0, -1):
        legend = figure.legend(
            [shown[label] for label in labels], labels, frameon=False, loc="outside lower center", ncols=columns
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def _scale(axes: Any, numbers: Sequence[float], exact: bool) -> None:
    """Make the axis logarithmic where that fits its numbers. exact: put the ticks at the numbers, if they are few."""
    low, high = min(numbers), max(numbers)
    if _is_logarithmic(numbers):
        axes.set_xscale("log")
    if exact and len(set(numbers)) <= 10:
        axes.set_xticks(sorted(set(numbers)), [f"{x:g}" for x in sorted(set(numbers))])
        axes.minorticks_off()
    elif low > 0:
        log_ticks(axes.xaxis, (low, high), counts=True)
