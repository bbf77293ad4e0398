"""Heatmaps of the first column over two settings: a panel per series and per difference against the baseline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from depthlm.config.experiment import Column
from depthlm.report.figures.axis import axis_title, ordered, setting
from depthlm.report.figures.stamp import stamp_of
from depthlm.report.figures.style import save, short, subplots
from depthlm.report.rows import Row, measured, paper
from depthlm.report.series import series_names, series_of
from depthlm.report.sweep import Sweep, title_of
from depthlm.report.tables import number_text, signed_text


@dataclass(frozen=True)
class Panel:
    """A grid of numbers, [y, x]; nan where there is none. centred: whether the numbers are differences."""

    title: str
    grid: Any
    centred: bool


def draw_heatmap(sweep: Sweep, path: Path) -> list[str] | None:
    """Draw the heatmaps, ours above the paper's; None where there is nothing to draw.

    Rows without both settings have no cell. Returns the notes on the figure.
    """
    across, upwards = sweep.experiment.x, sweep.experiment.y or ""
    cells = {row.label: (setting(row, across), setting(row, upwards)) for row in sweep.rows}
    placed = [row for row in sweep.rows if None not in cells[row.label]]
    x, y = (ordered([str(cells[row.label][number]) for row in placed]) for number in (0, 1))
    name, column = sweep.first

    def ours(row: Row) -> float | None:
        number = measured(row, column)
        return None if number is None else number.mean

    rows = [_panels(sweep, placed, x, y, ours, "")]
    if any(paper(row, name) is not None for row in placed):
        rows.append(_panels(sweep, placed, x, y, lambda row: paper(row, name), ", the paper's"))
    if not any(np.isfinite(panel.grid).any() for panels in rows for panel in panels):
        return None
    cell = max(0.62, 0.14 * (column.digits + 3))
    width, height = 1.6 + cell * len(x), 1.5 + 0.5 * len(y)
    figure, axes = subplots(len(rows[0]), width * len(rows[0]), height * len(rows), rows=len(rows))
    for line, panels in zip(axes, rows, strict=True):
        for is_difference in (False, True):
            chosen = [number for number, panel in enumerate(panels) if panel.centred == is_difference]
            if chosen:
                _draw(figure, [line[n] for n in chosen], [panels[n] for n in chosen], x, y, column)
        line[0].set_ylabel(axis_title(upwards))
        for place in line:
            place.set_xlabel(axis_title(across))
    figure.suptitle(f"{title_of(name, column)} ({column.better} is better)", fontsize="medium")
    save(figure, path, stamp_of(sweep, beside_paper=len(rows) > 1))
    notes = ["Hatched cells: no complete run (in the paper's panels, no number)."]
    notes.append("The best cell of a panel is bold; panels of one kind share a colour scale.")
    if len(placed) < len(sweep.rows):
        notes.append(f"{len(sweep.rows) - len(placed)} rows lack one of the settings and have no cell.")
    if len({(series_of(row, sweep.experiment), cells[row.label]) for row in placed}) < len(placed):
        notes.append("Several rows share a cell, which shows the first; fix the other settings in which they differ.")
    return notes


def _panels(
    sweep: Sweep,
    rows: Sequence[Row],
    x: Sequence[str],
    y: Sequence[str],
    value: Callable[[Row], float | None],
    whose: str,
) -> list[Panel]:
    names = series_names(rows, sweep.experiment)
    grids = {series: np.full((len(y), len(x)), np.nan) for series in names}
    # reversed, so that the first row of a cell remains
    for row in reversed(rows):
        number = value(row)
        across, upwards = (str(setting(row, name or "")) for name in (sweep.experiment.x, sweep.experiment.y))
        cell = y.index(upwards), x.index(across)
        grids[series_of(row, sweep.experiment)][cell] = np.nan if number is None else number
    panels = [Panel(f"{names[series]}{whose}", grid, False) for series, grid in grids.items()]
    baseline = next((key for key in names if sweep.experiment.baseline in (key, names[key])), None)
    if baseline is None:
        return panels
    others = [series for series in names if series != baseline]
    return panels + [
        Panel(f"{names[series]} - {names[baseline]}{whose}", grids[series] - grids[baseline], True) for series in others
    ]


def _draw(
    figure: Any, places: Sequence[Any], panels: Sequence[Panel], x: list[str], y: list[str], column: Column
) -> None:
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    finite = np.concatenate([panel.grid[np.isfinite(panel.grid)] for panel in panels])
    centred = panels[0].centred
    most = float(np.abs(finite).max()) if finite.size else 1.0
    low, high = (-most, most) if centred else (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    norm = Normalize(low, high if high > low else low + 1)
    for axes, panel in zip(places, panels, strict=True):
        image = axes.imshow(panel.grid, cmap="PuOr_r" if centred else "viridis_r", norm=norm, aspect="auto")
        axes.set_title(short(panel.title, 40), fontsize="medium")
        axes.set_xticks(range(len(x)), [short(text, 12) for text in x])
        axes.set_yticks(range(len(y)), [short(text, 12) for text in y])
        axes.tick_params(length=0)
        axes.invert_yaxis()
        text = signed_text if centred else number_text
        lower = column.better == "lower"
        best = np.nanmin(panel.grid) if lower else np.nanmax(panel.grid)
        for (up, right), value in np.ndenumerate(panel.grid):
            if not np.isfinite(value):
                axes.add_patch(
                    Rectangle((right - 0.5, up - 0.5), 1, 1, fill=False, hatch="////", edgecolor="#BBBBBB", lw=0)
                )
                continue
            red, green, blue, _ = image.cmap(norm(value))
            ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
            weight = "bold" if value == best else "normal"
            axes.text(
                right, up, text(float(value), column.digits), ha="center", va="center", color=ink, size=8, weight=weight
            )
    figure.colorbar(image, ax=list(places), shrink=0.85, pad=0.02)
