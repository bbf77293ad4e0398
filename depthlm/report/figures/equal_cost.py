"""The loss over each cost, with the front of the rows that no other row beats in both."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from depthlm.config.experiment import Column
from depthlm.report.figures.style import mechanism_of, style_of
from depthlm.report.rows import Row, measure_column
from depthlm.report.sweep import Sweep, title_of
from depthlm.runs.plots import grid, legend_below, log_ticks, save, short, subplots


class CostPoint(NamedTuple):
    """A row in a figure: its cost, its number, and half the width of the number's 95% interval, None for one seed."""

    cost: float
    value: float
    interval: float | None


def draw_costs(sweep: Sweep, rows: Sequence[Row], costs: Mapping[str, Column], path: Path) -> None:
    """Draw the first column of these rows over each cost that a row has, a panel each, with 95% intervals."""
    name, column = sweep.first
    numbers = sweep.pooled_numbers()
    series = [each for each in sweep.series if any(row in rows for row in each.rows)]
    styles = style_of([mechanism_of(each.rows[0].points[0]) for each in series])
    shown = [cost for cost in costs.values() if any(measure_column(row, cost) is not None for row in rows)]
    rows_of_panels = math.ceil(len(shown) / 2)
    figure, axes = subplots(2, 9.6, 0.6 + 3.6 * rows_of_panels, rows=rows_of_panels, sharey=True)
    panels = list(axes.flat)
    for empty in panels[len(shown) :]:
        empty.remove()
    for panel, cost in zip(panels, shown, strict=False):
        every_point: list[CostPoint] = []
        for each, style in zip(series, styles, strict=True):
            points = [
                CostPoint(x.mean, y.mean, y.interval)
                for row in each.rows
                if (x := measure_column(row, cost)) is not None and (y := numbers[row.label]) is not None
            ]
            every_point += points
            panel.errorbar(
                [point.cost for point in points], [point.value for point in points],
                [point.interval or 0.0 for point in points], fmt=style.marker, color=style.colour,
                ms=7, mec="white", mew=0.6, elinewidth=1.2, label=short(each.name), zorder=3,
            )  # fmt: skip
        front = find_front(every_point, lower=column.better == "lower")
        costs_of_front, values = [point.cost for point in front], [point.value for point in front]
        panel.plot(costs_of_front, values, color="#999999", lw=1.2, drawstyle="steps-post")
        panel.set_xscale("log")
        log_ticks(panel.xaxis, panel.get_xlim(), counts=True)
        panel.set_xlabel(cost.title)
        grid(panel)
    figure.supylabel(f"{title_of(name, column)} ({column.better} is better)", fontsize="medium")
    legend_below(figure, panels[: len(shown)], 5)
    save(figure, path, sweep.stamp(), sweep.experiment.title)


def find_front(points: Sequence[CostPoint], lower: bool = True) -> list[CostPoint]:
    """Return the points whose value no point of at most their cost reaches, the cheapest first.

    A value reaches another one where their intervals overlap. Empty if a point has no interval.
    """
    sign = 1 if lower else -1
    best: list[CostPoint] = []
    for point in sorted(points, key=lambda point: (point.cost, sign * point.value)):
        if point.interval is None:
            return []
        if not best or sign * (best[-1].value - point.value) > point.interval + (best[-1].interval or 0.0):
            best.append(point)
    return best
