"""Curves of many runs in one figure: training losses, a panel per task, or validation perplexities over one axis."""

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from depthlm.counts import count_text
from depthlm.report.figures.style import Mechanism, Style, mechanism_of, style_of
from depthlm.report.rows import Row
from depthlm.report.sweep import Sweep, range_text
from depthlm.runs.plots import distinct, grid, save, short, subplots
from depthlm.runs.records import COMPLETE, RunRecord, Validation, interval_losses, perplexity

# SMOOTHED: the share of a run's logged steps in the running mean. START: the share of a panel's longest run whose
# losses may exceed the y axis, so that differences at the end can be seen.
SMOOTHED, START = 0.04, 0.3
# the fewest logged steps of a run that is smoothed
SMOOTHABLE = 24
# with more curves in a panel, the legend has only the lowest of each mechanism
MOST_NAMED = 24
ACROSS = 3
# the longest training time, in seconds, that is shown in each unit
UNITS = {"seconds": 600.0, "minutes": 4 * 3600.0, "hours": math.inf}
SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
VALIDATIONS = "Points: the validations, each the perplexity of the mean loss over the validation sets."
# the height of a line of a legend and the width of a letter of it and of a title, in inches
LINE, LETTER, TITLE_LETTER = 0.17, 0.075, 0.085


@dataclass(frozen=True)
class Panel:
    """The loss curves of one task: a row for each, by its name."""

    title: str
    rows: dict[str, Row]


class Line(NamedTuple):
    """Numbers over x, such as losses over tokens; nan where there is a gap."""

    x: Any
    y: Any

    @property
    def end(self) -> tuple[float, float]:
        """The last point that is not in a gap."""
        last = np.flatnonzero(np.isfinite(self.y))[-1]
        return float(self.x[last]), float(self.y[last])


class Quantity(NamedTuple):
    """What curves show. read: a run's line, without points where it has none. x, y: the titles of the axes.

    note: for the reader of a report. marker: of each point; None: only a line. paired: as of `mean_line`. counts:
    whether x is a number such as 10M tokens.
    """

    read: Callable[[RunRecord], Line]
    x: str
    y: str
    note: str
    marker: str | None = None
    paired: bool = False
    counts: bool = True


def panels_of(sweep: Sweep) -> list[Panel]:
    """Return a panel for each task that the experiment names, or for each model size, in the order of the rows."""
    groups: dict[str, list[Row]] = {}
    for row in sweep.rows:
        groups.setdefault(row.parts.get("task") or sweep.shape_of(row)[0], []).append(row)
    return [Panel(_make_title(sweep, title, rows), named_rows(rows)) for title, rows in groups.items()]


def _make_title(sweep: Sweep, title: str, rows: Sequence[Row]) -> str:
    """Return a title with the sizes of the models, as in `micro: 4 layers of width 64, 369K parameters`."""
    shapes = {sweep.shape_of(row) for row in rows}
    facts = [f"{layers} layers of width {width}" for _, layers, width in shapes if layers and len(shapes) == 1]
    parameters = {value for row in rows for run in row.runs if (value := run.number("parameters")) is not None}
    facts += [f"{range_text(parameters)} parameters"] if parameters else []
    return ": ".join(filter(None, [title, ", ".join(facts)]))


def named_rows(rows: Sequence[Row]) -> dict[str, Row]:
    """Return rows by their labels, without the parts that all of them share where the rest still distinguishes them."""
    # there are none before the first choice of experiment.best_over
    shared = set.intersection(*(set(row.parts.items()) for row in rows)) if rows else set()
    names = [", ".join(text for part, text in row.parts.items() if (part, text) not in shared) for row in rows]
    if not all(names) or len(set(names)) < len(names):
        names = [row.label for row in rows]
    return dict(zip(names, rows, strict=True))


def draw_loss_curves(sweep: Sweep, path: Path) -> list[str] | None:
    """Draw training losses over tokens, smoothed; None where no run has any. Returns the notes on the figure."""
    about = f"Training losses, as a running mean over about {SMOOTHED:.0%} of a run's logged steps."
    quantity = Quantity(read_losses, "tokens", "training loss (nats per token)", about)
    return draw_curves(sweep, panels_of(sweep), quantity, path)


def draw_validation_curves(sweep: Sweep, over: str, path: Path) -> list[str] | None:
    """Draw the perplexity of all rows over `steps`, `tokens` or `time`; None where no run has any. Returns notes."""
    return draw_curves(sweep, [Panel("", named_rows(sweep.rows))], _quantity(over, sweep.runs), path)


def _quantity(over: str, runs: list[RunRecord]) -> Quantity:
    longest = max((validation.seconds or 0.0 for run in runs for validation in run.validations), default=0.0)
    unit = next(unit for unit, most in UNITS.items() if longest <= most)

    def place(validation: Validation) -> float | None:
        if over == "time":
            return None if validation.seconds is None else validation.seconds / SECONDS[unit]
        return validation.step if over == "steps" else validation.tokens

    def read(run: RunRecord) -> Line:
        places = [(place(validation), perplexity(validation.loss)) for validation in run.validations]
        points = [(x, math.nan if y is None else y) for x, y in places if x is not None]
        return Line(np.array([x for x, _ in points], float), np.array([y for _, y in points], float))

    title = f"training time ({unit})" if over == "time" else over
    return Quantity(read, title, "validation perplexity", VALIDATIONS, "o", paired=True, counts=over != "time")


def draw_curves(sweep: Sweep, panels: Sequence[Panel], quantity: Quantity, path: Path) -> list[str] | None:
    """Draw a quantity of all runs; None where no run has it. Returns the notes on the figure."""
    panels = [panel for panel in panels if any(_has(quantity, run) for row in panel.rows.values() for run in row.runs)]
    if not panels:
        return None
    across = 2 if len(panels) == 4 else min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    names = [name for panel in panels for name in _names(panel)]
    lines = min(MOST_NAMED, max(len(panel.rows) for panel in panels))
    high = 1.1 + max(3.6 if len(panels) == 1 else 2.8, lines * LINE)
    # the legend is beside the axes
    wide = (6.5 if across == 1 else 3.7) + 0.7 + LETTER * max(map(len, names))
    figure, axes = subplots(across, wide * across, high * down, rows=down)
    for place, panel in zip(axes.flat, panels, strict=False):
        _draw(place, panel, quantity)
        letters = int(wide / TITLE_LETTER)
        place.set_title(textwrap.fill(short(panel.title, 2 * letters), letters), fontsize="medium", loc="left")
    for place in axes.flat[len(panels) :]:
        place.set_visible(False)
    for place in axes[:, 0]:
        place.set_ylabel(quantity.y)
    save(figure, path, sweep.stamp(), sweep.experiment.title)
    return _notes(panels, quantity)


def _notes(panels: Sequence[Panel], quantity: Quantity) -> list[str]:
    rows = [row for panel in panels for row in panel.rows.values()]
    notes = [quantity.note]
    if any(len(row.runs) > 1 for row in rows):
        notes.append("Lines: the mean over the complete seeds; bands: from the lowest to the highest of them.")
    if any(run.state != COMPLETE and _has(quantity, run) for row in rows for run in row.runs):
        notes.append("Thin pale lines that end in a cross are incomplete runs.")
    crowded = max(len(panel.rows) for panel in panels)
    if crowded > MOST_NAMED:
        notes.append(f"{crowded} curves in a panel are too many to name: the legend has the lowest of each mechanism.")
    return notes


def _has(quantity: Quantity, run: RunRecord) -> bool:
    return bool(np.isfinite(quantity.read(run).y).any())


def read_losses(run: RunRecord) -> Line:
    """Return the tokens and the smoothed training loss of a run's logging intervals, with nan for gaps."""
    points = interval_losses(run.rows)
    losses = np.array([np.nan if loss is None else loss for _, loss in points], float)
    return Line(np.array([tokens for tokens, _ in points], float), smooth(losses))


def smooth(loss: Any) -> Any:
    """Return the centred mean over a share SMOOTHED of the rows, over fewer at the ends; gaps remain gaps."""
    # at least one neighbour on each side, except in the shortest runs
    width = max(int(SMOOTHED * len(loss)) // 2, int(len(loss) >= SMOOTHABLE))
    if width == 0:
        return loss
    valid = np.isfinite(loss)
    window = np.ones(2 * width + 1)
    total = np.convolve(np.where(valid, loss, 0.0), window, "same")
    count = np.convolve(valid.astype(float), window, "same")
    return np.where(valid, total / np.maximum(count, 1), np.nan)


def mean_line(lines: Sequence[Line], paired: bool = False) -> tuple[Line, Any]:
    """Return the mean of lines at the x of the first one that all others reach, and their numbers, [lines, points].

    The others are interpolated. A gap in one line is a gap of the mean. paired: whether the points of lines with as
    many of them belong together, as validations that take place at different times; then x is a mean too.
    """
    if paired and len({len(line.x) for line in lines}) == 1:
        numbers = np.array([line.y for line in lines])
        return Line(np.mean([line.x for line in lines], axis=0), numbers.mean(axis=0)), numbers
    start, end = max(line.x[0] for line in lines), min(line.x[-1] for line in lines)
    x = lines[0].x[(lines[0].x >= start) & (lines[0].x <= end)]
    numbers = np.array([np.interp(x, *line) for line in lines]).reshape(len(lines), len(x))
    return Line(x, numbers.mean(axis=0)), numbers


def _draw(axes: Any, panel: Panel, quantity: Quantity) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    drawn: list[Line] = []
    # the end of each curve, its entry in a legend and its mechanism
    named: list[tuple[float, Any, Mechanism]] = []
    mechanisms = [mechanism_of(row) for row in panel.rows.values()]
    curves = zip(panel.rows.values(), _names(panel), mechanisms, style_of(mechanisms), strict=True)
    for row, name, mechanism, style in curves:
        lines = _draw_runs(axes, row.runs, style, quantity)
        drawn += lines
        if lines:
            entry = Line2D([], [], color=style.colour, ls=style.dash, label=name)
            named.append((lines[-1].end[1], entry, mechanism))
    # from top to bottom, as the curves end
    named.sort(key=lambda one: -one[0])
    if len(named) > MOST_NAMED:
        lowest = {mechanism: (end, entry, mechanism) for end, entry, mechanism in named}
        named = sorted(lowest.values(), key=lambda one: -one[0])
        for _, entry, mechanism in named:
            entry.set_label(short(mechanism.name))
    _limit(axes, drawn)
    look = {"frameon": False, "fontsize": "small", "loc": "center left", "bbox_to_anchor": (1, 0.5)}
    axes.legend(handles=[entry for _, entry, _ in named], **look)
    axes.set_xlabel(quantity.x)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    if quantity.counts:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
    grid(axes)


def _draw_runs(axes: Any, runs: Sequence[RunRecord], style: Style, quantity: Quantity) -> list[Line]:
    """Draw each run, and the mean of the complete ones; return all lines, the one to be named last."""
    single = len(runs) == 1
    lines, complete = [], []
    look = {"color": style.colour, "ls": style.dash, "marker": quantity.marker, "ms": 3}
    for run in runs:
        line = quantity.read(run)
        if not np.isfinite(line.y).any():
            continue
        lines.append(line)
        if run.state == COMPLETE:
            complete.append(line)
        else:
            axes.plot(*line, alpha=0.5, lw=1.5 if single else 0.7, **look)
            axes.plot(*line.end, "x", color=style.colour, ms=7, mew=1.8)
    nothing = Line(np.array([]), np.array([])), np.array([])
    mean, losses = mean_line(complete, quantity.paired) if complete else nothing
    if not np.isfinite(mean.y).any():
        for line in complete:
            axes.plot(*line, lw=0.7, **look)
        return sorted(lines, key=lambda line: line.x[-1])
    is_point = np.isfinite(mean.y).sum() == 1
    axes.plot(mean.x, mean.y, lw=1.5, **look | ({"marker": ".", "ms": 6} if is_point else {}))
    if len(complete) > 1:
        axes.fill_between(mean.x, losses.min(axis=0), losses.max(axis=0), color=style.colour, alpha=0.15, lw=0)
    return [*lines, mean]


def _names(panel: Panel) -> list[str]:
    """Return the names of a panel's curves, each with the state of a run that is alone and not complete."""
    return [f"{name}{_state(row.runs)}" for name, row in zip(distinct([*panel.rows]), panel.rows.values(), strict=True)]


def _state(runs: Sequence[RunRecord]) -> str:
    run = runs[0]
    is_alone = len(runs) == 1 and run.state != COMPLETE and run.step is not None
    return f" ({run.state}, step {run.step:,})" if is_alone else ""


def _limit(axes: Any, lines: Sequence[Line]) -> None:
    """Set a range of losses that includes every loss after the start of the panel's longest run.

    Of a run that ends before, it includes those after its own start.
    """
    longest = max(float(line.x[-1]) for line in lines)
    axes.set_xlim(0, longest)
    starts = [START * (longest if line.end[0] >= START * longest else line.end[0]) for line in lines]
    losses = np.concatenate([line.y[line.x >= start] for line, start in zip(lines, starts, strict=True)])
    losses = losses[np.isfinite(losses)]
    if losses.size:
        margin = 0.05 * np.ptp(losses) or 0.1
        axes.set_ylim(losses.min() - margin, losses.max() + margin)
