"""The loss over each cost, with the front of the rows that no other row beats in both."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from depthlm.config.experiment import Column
from depthlm.report.figures.style import mechanism_of, style_of
from depthlm.report.rows import Row, measured
from depthlm.report.sweep import Sweep, title_of
from depthlm.runs.plots import grid, legend_below, log_ticks, save, short, subplots


def draw_costs(sweep: Sweep, rows: Sequence[Row], costs: Mapping[str, Column], path: Path) -> None:
    """Draw the first column of these rows over each cost that a row has, a panel each."""
    name, column = sweep.first
    series = [each for each in sweep.series if any(row in rows for row in each.rows)]
    styles = style_of([mechanism_of(each.rows[0].points[0]) for each in series])
    shown = [cost for cost in costs.values() if any(measured(row, cost) is not None for row in rows)]
    rows_of_panels = math.ceil(len(shown) / 2)
    figure, axes = subplots(2, 9.6, 0.6 + 3.6 * rows_of_panels, rows=rows_of_panels, sharey=True)
    panels = list(axes.flat)
    for empty in panels[len(shown) :]:
        empty.remove()
    for panel, cost in zip(panels, shown, strict=False):
        every_point: list[tuple[float, float]] = []
        for each, style in zip(series, styles, strict=True):
            points = [
                (x.mean, y.mean)
                for row in each.rows
                if (x := measured(row, cost)) is not None and (y := measured(row, column)) is not None
            ]
            every_point += points
            panel.plot(
                [x for x, _ in points], [y for _, y in points], style.marker, color=style.colour,
                ms=7, mec="white", mew=0.6, label=short(each.name), zorder=3,
            )  # fmt: skip
        front = pareto_front(every_point, lower=column.better == "lower")
        panel.plot([x for x, _ in front], [y for _, y in front], color="#999999", lw=1.2, drawstyle="steps-post")
        panel.set_xscale("log")
        log_ticks(panel.xaxis, panel.get_xlim(), counts=True)
        panel.set_xlabel(cost.title)
        grid(panel)
    figure.supylabel(f"{title_of(name, column)} ({column.better} is better)", fontsize="medium")
    legend_below(figure, panels[: len(shown)], 5)
    save(figure, path, sweep.stamp(), sweep.experiment.title)


def pareto_front(points: Sequence[tuple[float, float]], lower: bool = True) -> list[tuple[float, float]]:
    """Return the points (cost, value) whose value no point of at most their cost reaches, the cheapest first."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], point[1] if lower else -point[1])):
        if not best or (y < best[-1][1] if lower else y > best[-1][1]):
            best.append((x, y))
    return best
