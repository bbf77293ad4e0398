"""The tables of a report: our numbers next to the paper's, and both relative to the baseline."""

import math
from collections.abc import Callable, Sequence

from depthlm.config.experiment import Column
from depthlm.report.rows import FACTS, Measured, Row, measured, paper, paper_difference
from depthlm.report.series import differences, reference_of, task
from depthlm.report.sweep import Sweep, title_of
from depthlm.report.tables import DASH, MISSING, Cell, Table, cells, number_text, signed_text
from depthlm.runs.records import COMPLETE

# the most columns for which ours, the paper's and the difference are side by side; the most columns of one table
SIDE_BY_SIDE, WIDEST = 3, 10


def comparison_tables(sweep: Sweep) -> dict[str, list[Table]]:
    """Return the tables of each group of columns: one if it has few, else ours, the paper's and differences apart.

    Where the runs do not follow the paper's protocol, there are no differences from the paper's numbers.
    """
    groups: dict[str, dict[str, Column]] = {}
    for name, column in sweep.columns.items():
        groups.setdefault(column.group, {})[name] = column
    tables: dict[str, list[Table]] = {}
    for group, columns in groups.items():
        named = f"{group}: " if group else ""
        if len(columns) <= SIDE_BY_SIDE:
            tables[group] = [_side_by_side(sweep, columns, group)]
            continue
        tables[group] = []
        for part in _parts(columns):
            printed = any(_printed(sweep, name) for name in part)
            tables[group].append(_table(sweep, part, f"{named}ours" if printed else group, ours_cells))
            if printed:
                tables[group].append(_table(sweep, part, f"{named}the paper's", _paper_cells))
                apart = _table(sweep, part, f"{named}ours - the paper's", _apart_cells)
                if sweep.as_printed and any(cell.text != DASH for row in apart.rows for cell in row[1:]):
                    tables[group].append(apart)
    return tables


def against_table(sweep: Sweep) -> Table | None:
    """Return the first column's differences from the baseline's row, ours and the paper's; None for a single row.

    Our differences have 95% intervals, with the deviation between seeds pooled over the rows of a series.
    """
    name, column = sweep.first
    references = [reference_of(row, sweep.rows, sweep.experiment) for row in sweep.rows]
    names = list(dict.fromkeys(reference.label for reference in references if reference is not None))
    if not names or all(row is reference for row, reference in zip(sweep.rows, references, strict=True)):
        return None
    one = names[0] if len(names) == 1 else ""
    rows = []
    found = differences(sweep.rows, sweep.experiment, column)
    for row, reference, ours in zip(sweep.rows, references, found, strict=True):
        if row is reference:
            continue
        theirs = None if reference is None else paper_difference(row, reference, name)
        against = [] if one else [DASH if reference is None else reference.label]
        ours_text = _missing(row, reference) if ours is None else _with_interval(ours, column)
        theirs_text = [signed_text(theirs, column.digits)] if _printed(sweep, name) else []
        rows.append(cells([row.label, *against, ours_text, *theirs_text]))
    head = ["", *([] if one else ["against"]), "ours", *(["paper"] if _printed(sweep, name) else [])]
    return Table(head, rows, f"{title_of(name, column)}, against {one or 'the baseline of the same task'}")


def _missing(row: Row, reference: Row | None) -> str:
    if reference is None:
        return DASH
    return MISSING if not (_any_complete(row) and _any_complete(reference)) else DASH


def _any_complete(row: Row) -> bool:
    return any(run.state == COMPLETE for run in row.runs)


def _parts(columns: dict[str, Column]) -> list[dict[str, Column]]:
    """Split the columns into as few tables as possible, of nearly equal width."""
    count = math.ceil(len(columns) / WIDEST)
    width = math.ceil(len(columns) / count)
    items = list(columns.items())
    return [dict(items[start : start + width]) for start in range(0, len(items), width)]


def _side_by_side(sweep: Sweep, columns: dict[str, Column], title: str) -> Table:
    head, body = _labels(sweep)
    for name, column in columns.items():
        shown = [ours_cells(sweep, name, column)]
        head.append(f"{headed(name, column)}: ours" if _printed(sweep, name) else headed(name, column))
        if _printed(sweep, name):
            shown.append(_paper_cells(sweep, name, column))
            head.append("paper")
            if sweep.as_printed:
                shown.append(_apart_cells(sweep, name, column))
                head.append("difference")
        body = [[*line, *more] for line, *more in zip(body, *shown, strict=True)]
    return Table(head, body, title)


def _table(
    sweep: Sweep, columns: dict[str, Column], title: str, column_cells: Callable[[Sweep, str, Column], list[Cell]]
) -> Table:
    head, body = _labels(sweep)
    for name, column in columns.items():
        head.append(headed(name, column))
        body = [[*line, cell] for line, cell in zip(body, column_cells(sweep, name, column), strict=True)]
    return Table(head, body, title)


def _labels(sweep: Sweep) -> tuple[list[str], list[list[Cell]]]:
    """Return the first columns: the labels, and the number of seeds where any row has several."""
    if all(len(row.points) == 1 for row in sweep.rows):
        return [""], [[Cell(row.label)] for row in sweep.rows]
    return ["", "seeds"], [[Cell(row.label), Cell(str(len(row.points)))] for row in sweep.rows]


def headed(name: str, column: Column) -> str:
    """Return the heading of a column, with an arrow for which numbers are better."""
    if column.metric in FACTS:
        return title_of(name, column)
    return f"{title_of(name, column)} {'↓' if column.better == 'lower' else '↑'}"


def _printed(sweep: Sweep, name: str) -> bool:
    return any(paper(row, name) is not None for row in sweep.rows)


def ours_cells(sweep: Sweep, name: str, column: Column) -> list[Cell]:
    """Return our numbers of a column, with the best of each task in bold."""
    numbers = [measured(row, column) for row in sweep.rows]
    best = _best(sweep, column, numbers)
    shown = []
    for row, value, is_best in zip(sweep.rows, numbers, best, strict=True):
        if value is None:
            shown.append(Cell(MISSING if column.metric and not _any_complete(row) else DASH))
            continue
        text = _with_deviation(value, column)
        partly = f" ({value.count} of {len(row.points)})" if value.count < len(row.points) else ""
        shown.append(Cell(f"{text}{partly}", is_best))
    return shown


def _best(sweep: Sweep, column: Column, numbers: Sequence[Measured | None]) -> list[bool]:
    """Return, for each number, whether it is the best of its task after rounding, where the task has others."""
    references = [reference_of(row, sweep.rows, sweep.experiment) for row in sweep.rows]
    tasks = [
        str(sorted(task(row, sweep.experiment).items())) if reference is None else reference.label
        for row, reference in zip(sweep.rows, references, strict=True)
    ]
    rounded = [None if value is None else round(value.mean, column.digits) for value in numbers]
    best = []
    for own, value in zip(tasks, rounded, strict=True):
        rivals = [other for of, other in zip(tasks, rounded, strict=True) if of == own and other is not None]
        top = min(rivals, default=None) if column.better == "lower" else max(rivals, default=None)
        best.append(column.metric not in FACTS and value is not None and value == top and len(set(rivals)) > 1)
    return best


def _paper_cells(sweep: Sweep, name: str, column: Column) -> list[Cell]:
    return cells([number_text(paper(row, name), column.digits) for row in sweep.rows])


def _apart_cells(sweep: Sweep, name: str, column: Column) -> list[Cell]:
    shown = []
    for row in sweep.rows:
        ours, theirs = measured(row, column), paper(row, name)
        apart = None if ours is None or theirs is None else ours.mean - theirs
        shown.append(Cell(signed_text(apart, column.digits)))
    return shown


def _with_deviation(value: Measured, column: Column) -> str:
    shown = number_text(value.mean, column.digits)
    if value.deviation is None or column.metric in FACTS:
        return shown
    return f"{shown} ± {number_text(value.deviation, column.digits)}"


def _with_interval(value: Measured, column: Column) -> str:
    """Return a difference with the bounds of its 95% interval, as in `-0.0500 [-0.0712, -0.0288]`."""
    shown = signed_text(value.mean, column.digits)
    if column.metric in FACTS:
        return shown
    if value.count == 0:
        return f"{shown} (other seeds)"
    if value.interval is None:
        return shown
    low, high = (signed_text(value.mean + side * value.interval, column.digits) for side in (-1, 1))
    return f"{shown} [{low}, {high}]"
