"""The choice of a value in a report: what was chosen in each group, the values beside it, and the runs spent on it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from depthlm.config.experiment import Column
from depthlm.config.names import normal_value, short_key
from depthlm.counts import as_number, duration_text, format_count
from depthlm.report.comparison import difference_text
from depthlm.report.figures.charts import draw_lines
from depthlm.report.rows import Measured, Row, by_seed, difference, label_rows, measure_column, pool_deviations
from depthlm.report.sweep import Difference, Sweep
from depthlm.report.tables import DASH, Table, cells, markdown, number_text, plain
from depthlm.runs.records import WAITING, RunRecord
from depthlm.sweeps.best import (
    Value,
    group_of,
    report_parts,
    selection_column,
    sort_values,
    undecided_text,
    value_of,
)

LEGEND = (
    "Below and above: the neighbours of the chosen value in the grid, with their differences from it between runs with "
    "the same seed. In brackets: the 95% interval over the seeds that choose, by Student's t; the variance is pooled "
    "over the neighbours of a row's group. Where it contains 0, the seeds do not separate the two values."
)
LUCK = " The luck of a choice is part of the intervals of the differences of its row from others."

NOTE = (
    "Rings: the chosen values. Error bars: the 95% intervals of the table, of the differences of the neighbours from "
    "the chosen value. Lines are broken where a run diverged or is missing."
)


@dataclass(frozen=True)
class Group:
    """The grid of a group: its rows by their values; chosen: None while it is not known."""

    label: str
    grid: dict[Value, Row]
    chosen: Value
    column: Column

    @property
    def runs(self) -> list[RunRecord]:
        """The runs that choose."""
        return [run for row in self.grid.values() for run in row.runs]

    def diverged(self, value: Value) -> bool:
        """Return whether a run with this value is without a finite number."""
        row = self.grid[value]
        return len(by_seed(row, self.column)) < len(row.runs)

    def beside(self) -> tuple[Value, Value]:
        """Return the values below and above the chosen one; None at the edges."""
        texts = sort_values(self.grid)
        at = texts.index(self.chosen)
        return texts[at - 1] if at > 0 else None, texts[at + 1] if at + 1 < len(texts) else None

    def differences(self) -> dict[Value, Measured | None]:
        """Return the differences of all neighbours from the chosen value, with a common deviation.

        None for a neighbour of which a run diverged: the other seeds do not stand for it.
        """
        values = [value for value in self.beside() if value is not None]
        best = self.grid[self.chosen]
        ours = [None if self.diverged(value) else difference(self.grid[value], best, self.column) for value in values]
        return dict(zip(values, pool_deviations(ours), strict=True))

    def runner_up(self) -> str:
        """Return the best of the other values with its number; empty if none of them has one."""
        others = {value: measure_column(row, self.column) for value, row in self.grid.items() if value != self.chosen}
        known = {value: measured.mean for value, measured in others.items() if measured is not None}
        if not known:
            return ""
        sign = 1 if self.column.better == "lower" else -1
        value = min(known, key=lambda value: sign * known[value])
        return f"{value}: {number_text(known[value], self.column.digits)}"


def groups_of(sweep: Sweep) -> list[Group]:
    """Return the groups of a sweep that choose a value, in the order of its points."""
    chosen = {group_of(row.points[0]): value_of(row.points[0]) for row in sweep.rows}
    grids: dict[frozenset[tuple[str, str]], dict[Value, Row]] = {}
    for row in sweep.selection:
        grids.setdefault(group_of(row.points[0]), {})[value_of(row.points[0])] = row
    points = [next(iter(grid.values())).points[0] for grid in grids.values()]
    names = label_rows([Row([replace(p, settings=dict(group_of(p)))], [], report_parts(p)) for p in points])
    return [
        Group(
            name.label,
            grid,
            chosen.get(key),
            selection_column(sweep.experiment, (run for row in grid.values() for run in row.runs)),
        )
        for name, (key, grid) in zip(names, grids.items(), strict=True)
    ]


def choice_parts(sweep: Sweep, folder: Path) -> list[str]:
    """Draw the losses over the grids into a folder; return the section of a report in Markdown, empty without a choice.

    Raises OSError.
    """
    if not sweep.selection:
        return []
    groups = groups_of(sweep)
    table = replace(choice_tables(sweep)[0], title="")
    parts = ["## Choice", markdown(table), LEGEND + (LUCK if sweep.luck_text else ""), plain(_describe_cost(sweep))]
    name = setting_of(sweep)
    file = f"choice_{short_key(name).replace('/', '_')}.png"
    if _draw(sweep, groups, folder / file):
        return [*parts, f"![The choice of {name}]({file})", NOTE]
    # the figure of an earlier report must not be shown in this one
    (folder / file).unlink(missing_ok=True)
    return parts


def choice_state(sweep: Sweep) -> list[str]:
    """Return the groups without a chosen value as a sentence in Markdown; empty if there are none."""
    groups = sweep.undecided
    return [f"{plain(undecided_text(groups))}."] if groups else []


def setting_of(sweep: Sweep) -> str:
    """Return the setting whose value is chosen; empty without a choice."""
    return sweep.selection[0].points[0].best_over if sweep.selection else ""


def choice_tables(sweep: Sweep) -> list[Table]:
    """Return the table of the chosen values, with a row for each group; none without a choice."""
    if not sweep.selection:
        return []
    groups, name = groups_of(sweep), setting_of(sweep)
    rows = [cells([group.label, short_key(name), *_texts(group, name)]) for group in groups]
    title = groups[0].column.title or sweep.first[0]
    return [Table(["", "setting", "chosen", title, "below", "above", "runs", "remark"], rows, "Choice", words=True)]


def _texts(group: Group, name: str) -> list[str]:
    """Return the cells of a group, without its label and the setting."""
    spent = str(sum(run.state != WAITING for run in group.runs))
    if group.chosen is None:
        return [DASH, DASH, DASH, DASH, spent, "not chosen yet"]
    best, column, differences = group.grid[group.chosen], group.column, group.differences()
    texts, remarks = [], []
    if len(best.runs) == 1:
        second = group.runner_up()
        remarks.append("one seed: no interval" + (f"; runner-up {second}" if second else ""))
    for value in group.beside():
        if value is None:
            texts.append(DASH)
            continue
        text, ours = normal_value(name, value), differences[value]
        if ours is None:
            texts.append(f"{text}: diverged")
            continue
        texts.append(f"{text}: {difference_text(Difference(group.grid[value], best, ours, None), column)}")
        if ours.interval is not None and abs(ours.mean) <= ours.interval:
            remarks.append(f"not separated from {text}")
    # words have no edge
    if None in group.beside() and as_number(group.chosen) is not None:
        remarks.append("at the edge of the grid")
    loss = measure_column(best, column)
    shown = number_text(None if loss is None else loss.mean, column.digits)
    return [normal_value(name, group.chosen), shown, *texts, spent, "; ".join(remarks)]


def _describe_cost(sweep: Sweep) -> str:
    """Return how many runs choose and how many report, with the training time of the complete ones."""
    texts = []
    for rows in (sweep.selection, sweep.rows):
        runs = [run for row in rows for run in row.runs if run.state != WAITING]
        seconds = [value for run in runs if (value := run.number("wall_seconds")) is not None]
        time = f", {duration_text(sum(seconds))} of training in those that are complete" if seconds else ""
        texts.append(f"{format_count(len(runs), 'run')}{time}")
    return f"Spent to choose: {texts[0]}. To report: {texts[1]}."


def _draw(sweep: Sweep, groups: Sequence[Group], path: Path) -> bool:
    """Draw the column over the setting, a line for each group; return whether there is anything to draw."""
    rows, numbers, ringed = [], {}, set()
    for group in groups:
        differences = {} if group.chosen is None else group.differences()
        for value, row in group.grid.items():
            point = replace(row.points[0], settings=row.points[0].settings | {"group": group.label}, paper={})
            drawn = Row([point, *row.points[1:]], row.runs, {"label": group.label, "value": str(value)})
            rows.append(drawn)
            if value is not None and value == group.chosen:
                ringed.add(drawn.label)
            if not group.diverged(value) and (loss := measure_column(row, group.column)) is not None:
                # the interval of the loss itself would be that of the seeds, which all values share
                ours = differences.get(value)
                numbers[drawn.label] = replace(loss, deviation=None) if ours is None else replace(ours, mean=loss.mean)
    experiment = replace(sweep.experiment, series="group", x=setting_of(sweep), fits={}, title="")
    curves = Sweep(experiment, rows, {sweep.first[0]: groups[0].column}, [], [])
    return draw_lines(curves, path, numbers, ringed) is not None
