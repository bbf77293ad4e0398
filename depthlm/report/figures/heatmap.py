"""Heatmaps of the first column over two settings: a panel per series and per difference against the baseline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from depthlm.config.experiment import Column
from depthlm.report.rows import Row, measure_column, order_values, paper, setting, setting_title
from depthlm.report.sweep import Sweep, title_of
from depthlm.report.tables import number_text, signed_text
from depthlm.runs.plots import ink, save, short, subplots


@dataclass(frozen=True)
class Panel:
    """A grid of numbers, [y, x]; nan where there is none. centred: whether the numbers are differences."""

    title: str
    grid: Any
    centred: bool


@dataclass(frozen=True)
class Cells:
    """The settings x and y of the grids, and the cell [y, x] of each row that has both, by its label."""

    x: list[str]
    y: list[str]
    places: dict[str, tuple[int, int]]


def draw_heatmap(sweep: Sweep, path: Path) -> list[str] | None:
    """Draw the heatmaps, ours above the paper's; None where there is nothing to draw.

    Rows without both settings have no cell. Returns the notes on the figure.
    """
    name, column = sweep.first
    cells = cells_of(sweep)
    lines = [panels_of(sweep, cells, lambda row: None if (n := measure_column(row, column)) is None else n.mean, "")]
    if sweep.is_printed(name):
        lines.append(panels_of(sweep, cells, lambda row: paper(row, name), ", the paper's"))
    if not any(np.isfinite(panel.grid).any() for panels in lines for panel in panels):
        return None
    cell = max(0.62, 0.14 * (column.digits + 3))
    width, height = 1.6 + cell * len(cells.x), 1.5 + 0.5 * len(cells.y)
    figure, axes = subplots(len(lines[0]), width * len(lines[0]), height * len(lines), rows=len(lines))
    for places, panels in zip(axes, lines, strict=True):
        for is_difference in (False, True):
            chosen = [pair for pair in zip(places, panels, strict=True) if pair[1].centred == is_difference]
            if chosen:
                _draw(figure, chosen, cells, column)
        places[0].set_ylabel(setting_title(sweep.experiment.y or ""))
        for place in places:
            place.set_xlabel(setting_title(sweep.experiment.x))
    what = f"{title_of(name, column)} ({column.better} is better)"
    title = ": ".join(filter(None, [sweep.experiment.title, what]))
    save(figure, path, sweep.stamp(beside_paper=len(lines) > 1), title)
    return _notes(sweep, cells)


def _notes(sweep: Sweep, cells: Cells) -> list[str]:
    notes = ["Hatched cells: no complete run (in the paper's panels, no number)."]
    notes.append("The best cell of a panel is bold; panels of one kind share a colour scale.")
    placed = [row for row in sweep.rows if row.label in cells.places]
    if len(placed) < len(sweep.rows):
        notes.append(f"{len(sweep.rows) - len(placed)} rows lack one of the settings and have no cell.")
    if len({(sweep.series_of(row), cells.places[row.label]) for row in placed}) < len(placed):
        notes.append("Several rows share a cell, which shows the first; fix the other settings in which they differ.")
    return notes


def cells_of(sweep: Sweep) -> Cells:
    """Return the cells of the rows that have both settings."""
    values = {}
    for row in sweep.rows:
        across, upwards = setting(row, sweep.experiment.x), setting(row, sweep.experiment.y or "")
        if across is not None and upwards is not None:
            values[row.label] = across, upwards
    x, y = (order_values([pair[axis] for pair in values.values()]) for axis in (0, 1))
    return Cells(x, y, {label: (y.index(upwards), x.index(across)) for label, (across, upwards) in values.items()})


def panels_of(sweep: Sweep, cells: Cells, value: Callable[[Row], float | None], whose: str) -> list[Panel]:
    """Return a panel for each series, and for each difference against the baseline. whose: the end of their titles."""
    grids: dict[str, Any] = {}
    for series in sweep.series:
        # reversed, so that the first row of a cell remains
        for row in reversed(series.rows):
            if row.label in cells.places:
                grid = grids.setdefault(series.key, np.full((len(cells.y), len(cells.x)), np.nan))
                number = value(row)
                grid[cells.places[row.label]] = np.nan if number is None else number
    names = {series.key: series.name for series in sweep.series if series.key in grids}
    panels = [Panel(f"{name}{whose}", grids[key], False) for key, name in names.items()]
    if (baseline := sweep.experiment.baseline) in names:
        panels += [
            Panel(f"{name} - {names[baseline]}{whose}", grids[key] - grids[baseline], True)
            for key, name in names.items()
            if key != baseline
        ]
    return panels


def _draw(figure: Any, panels: Sequence[tuple[Any, Panel]], cells: Cells, column: Column) -> None:
    """Draw panels with their axes, on one colour scale."""
    centred = panels[0][1].centred
    norm = _norm(np.concatenate([panel.grid[np.isfinite(panel.grid)] for _, panel in panels]), centred)
    for axes, panel in panels:
        image = axes.imshow(panel.grid, cmap="PuOr_r" if centred else "viridis_r", norm=norm, aspect="auto")
        axes.set_title(short(panel.title, 40), fontsize="medium")
        axes.set_xticks(range(len(cells.x)), [short(text, 12) for text in cells.x])
        axes.set_yticks(range(len(cells.y)), [short(text, 12) for text in cells.y])
        axes.tick_params(length=0)
        axes.invert_yaxis()
        _draw_numbers(axes, panel, image, column)
    figure.colorbar(image, ax=[axes for axes, _ in panels], shrink=0.85, pad=0.02)


def _norm(numbers: Any, centred: bool) -> Any:
    """Return the colour scale of these numbers, symmetric around 0 if they are differences."""
    from matplotlib.colors import CenteredNorm, Normalize

    if centred:
        return CenteredNorm(halfrange=float(np.abs(numbers).max(initial=0)) or 1.0)
    low, high = (float(numbers.min()), float(numbers.max())) if numbers.size else (0.0, 1.0)
    return Normalize(low, high if high > low else low + 1)


def _draw_numbers(axes: Any, panel: Panel, image: Any, column: Column) -> None:
    """Write the numbers into the cells, the best in bold, and hatch the cells without a number."""
    from matplotlib.patches import Rectangle

    text = signed_text if panel.centred else number_text
    best = np.nanmin(panel.grid) if column.better == "lower" else np.nanmax(panel.grid)
    for (up, right), value in np.ndenumerate(panel.grid):
        if not np.isfinite(value):
            axes.add_patch(
                Rectangle((right - 0.5, up - 0.5), 1, 1, fill=False, hatch="////", edgecolor="#BBBBBB", lw=0)
            )
            continue
        colour, weight = ink(image.cmap(image.norm(value))), "bold" if value == best else "normal"
        axes.text(
            right, up, text(float(value), column.digits), ha="center", va="center", color=colour, size=8, weight=weight
        )
