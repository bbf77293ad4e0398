"""Charts of the first column: a bar per row, or a line per series over a setting or a number."""

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from depthlm.config.experiment import Column
from depthlm.counts import as_number
from depthlm.report.figures.style import Style, mechanism_of, style_of
from depthlm.report.rows import Measured, Row, measure_column
from depthlm.report.sweep import Difference, Sweep, references_text
from depthlm.report.tables import signed_text
from depthlm.runs.plots import distinct, grid, legend_below, log_ticks, save, short, subplots
from depthlm.sweeps.best import sort_values

# a numeric axis that spans more than this factor becomes logarithmic, and so does one with a constant factor between
# its numbers
LOGARITHMIC = 6
# the most columns of a legend
COLUMNS = 4
# the height of a bar, as a share of the place of a row
BAR = 0.36


@dataclass(frozen=True)
class Mark:
    """A number at x, and half the width of its 95% interval over seeds; where y is nan, the line has a gap.

    x is None where the row lacks the setting, so that its number holds for the whole axis, or where x is unknown.
    ringed: whether a ring is around it.
    """

    x: float | None
    y: float
    interval: float | None = None
    ringed: bool = False


@dataclass(frozen=True)
class Line:
    """A series along the axis: ours, or the paper's (hollow)."""

    name: str
    style: Style
    marks: list[Mark]
    hollow: bool

    @property
    def label(self) -> str:
        """The label in a legend."""
        return f"{self.name}, the paper's" if self.hollow else self.name


def draw_bars(sweep: Sweep, path: Path) -> list[str] | None:
    """Draw the first column of each row as a difference against the baseline's; None where there is none to draw.

    Where the protocol is not the paper's, the paper's numbers are in a separate panel; a trial has none. Returns notes
    on the figure.
    """
    from matplotlib.patches import Patch

    name, column = sweep.first
    bars = [entry for entry in sweep.differences() if entry.reference is not None]
    if all(bar.ours is None and bar.paper is None for bar in bars):
        return None
    with_paper = any(bar.paper is not None for bar in bars) and sweep.trial is None
    side_by_side = with_paper and not sweep.as_printed
    shift = BAR / 2 if with_paper and not side_by_side else 0.0
    panels = 2 if side_by_side else 1
    figure, axes = subplots(panels, 5 + 4 * panels, 1.9 + (0.62 if shift else 0.42) * len(bars), sharey=True)
    for number, bar in enumerate(bars):
        colour = mechanism_of(bar.row).colour
        _draw_ours(axes[0, 0], bar, number - shift, colour, column.digits)
        if bar.paper is not None and with_paper:
            look = {"color": "white", "edgecolor": colour, "hatch": "////", "lw": 1.2}
            drawn = axes[0, -1].barh(number + shift, bar.paper, BAR, **look)
            axes[0, -1].bar_label(drawn, [signed_text(bar.paper, column.digits)], padding=4, size=8)
    for panel, title in zip(axes[0], ("ours", "the paper's"), strict=False):
        panel.axvline(0, color="black", lw=1)
        panel.margins(x=0.16)
        panel.locator_params(axis="x", nbins=6)
        grid(panel, "x")
        if side_by_side:
            panel.set_title(title)
    axes[0, 0].set_yticks(range(len(bars)), distinct([bar.row.label for bar in bars], 36))
    axes[0, 0].set_ylim(len(bars) - 0.4, -0.6)
    label = f"{column.title or name}: difference against {references_text(bars)} ({column.better} is better)"
    figure.supxlabel(label, fontsize="medium")
    if shift:
        ours = Patch(facecolor="#777777", label="ours")
        papers = Patch(facecolor="white", edgecolor="#777777", hatch="////", label="the paper's")
        axes[0, 0].legend(handles=[ours, papers], frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    save(figure, path, sweep.stamp(beside_paper=with_paper), sweep.experiment.title)
    if all(bar.ours is None or bar.ours.interval is None for bar in bars):
        return []
    return [f"Error bars: 95% intervals over seeds, of differences paired by seed{sweep.luck_text}."]


def draw_lines(
    sweep: Sweep, path: Path, numbers: Mapping[str, Measured] | None = None, ringed: Set[str] = frozenset()
) -> list[str] | None:
    """Draw the first column along the experiment's x; None where there is nothing to draw.

    Where the protocol is not the paper's, the paper's numbers are in a separate panel. numbers: by the label of a row,
    what is drawn instead of its mean over seeds and the interval of that. ringed: the labels of rows to mark. Returns
    notes on the figure.
    """
    ours, papers = _lines(sweep, False, numbers, ringed), [] if sweep.trial else _lines(sweep, True)
    # on one axis only if they are comparable
    panels = [lines for lines in ([ours + papers] if sweep.as_printed else [ours, papers]) if lines]
    if not panels:
        return None
    figure, axes = subplots(len(panels), 7.5 if len(panels) == 1 else 12, 5)
    name, column = sweep.first
    for panel, lines in zip(axes[0], panels, strict=True):
        _draw(panel, lines, sweep)
        panel.set_xlabel(sweep.experiment.x.rpartition(".")[2].replace("_", " "))
        panel.set_ylabel(f"{column.title or name} ({column.better} is better)")
        if len(panels) > 1:
            panel.set_title("the paper's" if lines[0].hollow else "ours")
    names = list(dict.fromkeys(line.name for line in [*ours, *papers]))
    # matplotlib fills a legend column by column, so ours is above the paper's
    labels = [line.label for line in sorted([*ours, *papers], key=lambda line: (names.index(line.name), line.hollow))]
    legend_below(figure, axes[0], min(COLUMNS, len(names)), labels)
    save(figure, path, sweep.stamp(beside_paper=bool(papers)), sweep.experiment.title)
    return _notes(sweep, ours, papers)


def _notes(sweep: Sweep, ours: Sequence[Line], papers: Sequence[Line]) -> list[str]:
    notes = ["Hollow markers: the paper's numbers."] if papers else []
    if any(mark.interval is not None for line in ours for mark in line.marks):
        notes.append(f"Error bars: 95% intervals over seeds{sweep.luck_text}.")
    notes.append("Lines are broken where a number is missing.")
    printed = [row for row in sweep.rows if row.paper.get(sweep.first[0]) is not None]
    unplaced = sum(math.isnan(_mark(sweep, row, hollow=True).y) for row in printed)
    if unplaced:
        notes.append(f"{unplaced} of the paper's numbers are not drawn: their position on the axis is unknown.")
    return notes


def _lines(
    sweep: Sweep, hollow: bool, numbers: Mapping[str, Measured] | None = None, ringed: Set[str] = frozenset()
) -> list[Line]:
    def mark(row: Row) -> Mark:
        ours = measure_column(row, sweep.first[1]) if numbers is None else numbers.get(row.label)
        return replace(_mark(sweep, row, hollow, ours), ringed=row.label in ringed)

    styles = style_of([mechanism_of(series.rows[0]) for series in sweep.series])
    names = distinct([series.name for series in sweep.series])
    lines = [
        Line(name, style, [mark(row) for row in series.rows], hollow)
        for name, series, style in zip(names, sweep.series, styles, strict=True)
    ]
    return [line for line in lines if any(math.isfinite(mark.y) for mark in line.marks)]


def _mark(sweep: Sweep, row: Row, hollow: bool, ours: Measured | None = None) -> Mark:
    """Return the mark of a row; y is nan where the row has no number or no position on the axis."""
    name = sweep.first[0]
    x = (_paper_place if hollow else _place)(sweep, row)
    if x is None and not _settings(sweep):
        return Mark(None, math.nan)
    if hollow:
        printed = row.paper.get(name)
        return Mark(x, math.nan if printed is None else printed)
    return Mark(x, math.nan) if ours is None else Mark(x, ours.mean, ours.interval)


def _settings(sweep: Sweep) -> list[str]:
    """Return the distinct settings on the axis, in order; none if the axis is a number of summary.json."""
    return sort_values([value for row in sweep.rows if (value := row.settings.get(sweep.experiment.x)) is not None])


def _has_words(settings: Sequence[str]) -> bool:
    return any(as_number(text) is None for text in settings)


def _place(sweep: Sweep, row: Row) -> float | None:
    """Return the position of our number of a row on the axis, where words have their ranks; None if unknown."""
    settings = _settings(sweep)
    if not settings:
        number = measure_column(row, Column(metric=sweep.experiment.x))
        return None if number is None else number.mean
    text = row.settings.get(sweep.experiment.x)
    if text is None:
        return None
    return float(settings.index(text)) if _has_words(settings) else as_number(text)


def _paper_place(sweep: Sweep, row: Row) -> float | None:
    """Return the position of the paper's number: from the setting, the paper's number, or ours under its protocol.

    Where a paper prints one parameter count for a pair of models, it is the baseline's.
    """
    if _settings(sweep):
        return _place(sweep, row)
    for name, column in sweep.columns.items():
        for candidate in (row, sweep.reference_of(row)):
            value = None if candidate is None else candidate.paper.get(name)
            if column.metric == sweep.experiment.x and value is not None:
                return value * column.scale
    return _place(sweep, row) if sweep.as_printed else None


def _draw(axes: Any, lines: Sequence[Line], sweep: Sweep) -> None:
    settings = _settings(sweep)
    has_words = _has_words(settings)
    positions = [_points(line.marks, exact=bool(settings)) for line in lines]
    seen = [x for points in positions for x, _ in points if math.isfinite(x)]
    logarithmic = not has_words and _is_logarithmic(seen)
    for line, points, shift in zip(lines, positions, _shifts(lines, seen, logarithmic), strict=True):
        shifted = [(x * math.exp(shift) if logarithmic else x + shift, mark) for x, mark in points]
        _draw_line(axes, line, shifted)
    if has_words:
        axes.set_xticks(range(len(settings)), [short(word, 20) for word in settings])
        axes.set_xlim(-0.4, len(settings) - 0.6)
    elif seen:
        _scale(axes, seen, exact=bool(settings))
    grid(axes)


def _draw_line(axes: Any, line: Line, points: Sequence[tuple[float, Mark]]) -> None:
    look = line.style
    style: dict[str, Any] = {"color": look.colour, "marker": look.marker, "ms": 7, "ls": look.dash, "lw": 1.5}
    if line.hollow:
        style |= {"mfc": "white", "mew": 1.4, "lw": 0.9, "alpha": 0.9}
    if any(math.isfinite(mark.y) for _, mark in points):
        x, y = [x for x, _ in points], [mark.y for _, mark in points]
        intervals = [mark.interval or math.nan for _, mark in points]
        axes.errorbar(
            x, y, None if all(map(math.isnan, intervals)) else intervals, capsize=3, label=line.label, **style
        )
    ringed = [(x, mark.y) for x, mark in points if mark.ringed]
    if ringed:
        axes.plot(*zip(*ringed, strict=True), ls="", marker="o", ms=16, mfc="none", mec=look.colour, mew=1.5)
    for mark in line.marks:
        if mark.x is None and math.isfinite(mark.y):
            axes.axhline(mark.y, color=look.colour, ls=":" if line.hollow else "--", lw=1.3, label=line.label)


def _points(marks: Sequence[Mark], exact: bool) -> list[tuple[float, Mark]]:
    """Return the marks with their positions, from left to right if they are exact, as those of a setting are."""
    if exact:
        return sorted([(mark.x, mark) for mark in marks if mark.x is not None], key=lambda point: point[0])
    # a gap at an unknown position still breaks the line
    return [(math.nan if mark.x is None else mark.x, mark) for mark in marks]


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


def _draw_ours(axes: Any, bar: Difference, place: float, colour: str, digits: int) -> None:
    if bar.ours is None:
        look = {"textcoords": "offset points", "va": "center", "color": "grey", "size": 8}
        axes.annotate("missing", (0, place), xytext=(4, 0), **look)
        return
    drawn = axes.barh(place, bar.ours.mean, BAR, xerr=bar.ours.interval, color=colour, capsize=3, ecolor="black")
    axes.bar_label(drawn, [signed_text(bar.ours.mean, digits)], padding=4, size=8)
