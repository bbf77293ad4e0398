"""The tables of a report: our numbers next to the paper's, and both relative to the baseline."""

import math
from collections.abc import Callable, Sequence

from depthlm.config.experiment import Column
from depthlm.report.rows import FACTS, Measured, measure_column
from depthlm.report.sweep import Difference, Sweep, references_text
from depthlm.report.tables import DASH, MISSING, Cell, Table, cells, markdown, number_text, signed_text

# columns with numbers of a paper, and others, in one table
WITH_PAPER, ALONE = 3, 10


def comparison_tables(sweep: Sweep) -> dict[str, list[Table]]:
    """Return the tables of each group of columns, with few columns each: ours beside the paper's.

    Where the runs do not follow the paper's protocol, there are no differences from the paper's numbers.
    """
    groups: dict[str, list[str]] = {}
    for name, column in sweep.columns.items():
        groups.setdefault(column.group, []).append(name)
    tables: dict[str, list[Table]] = {}
    for group, names in groups.items():
        width = WITH_PAPER if any(map(sweep.is_printed, names)) else ALONE
        # of nearly equal width
        width = math.ceil(len(names) / math.ceil(len(names) / width))
        parts = [names[start : start + width] for start in range(0, len(names), width)]
        tables[group] = []
        for number, part in enumerate(parts, 1):
            place = f"({number} of {len(parts)})" if len(parts) > 1 else ""
            tables[group].append(_compare(sweep, part, f"{group} {place}".strip()))
    return tables


def _compare(sweep: Sweep, names: Sequence[str], title: str) -> Table:
    """Return the table of some columns beside the labels, with the number of seeds if any row has several."""
    shown = [("", cells([row.label for row in sweep.rows]))]
    if any(len(row.points) > 1 for row in sweep.rows):
        shown.append(("seeds", cells([str(len(row.points)) for row in sweep.rows])))
    for name in names:
        printed, heading = sweep.is_printed(name), _heading(sweep, name)
        shown.append((f"{heading}: ours" if printed else heading, _ours(sweep, name)))
        shown += [("paper", _papers(sweep, name))] if printed else []
        shown += [("difference", _differences(sweep, name))] if printed and sweep.as_printed else []
    body = [list(line) for line in zip(*(column for _, column in shown), strict=True)]
    return Table([heading for heading, _ in shown], body, title)


def _heading(sweep: Sweep, name: str) -> str:
    """Return the heading of a column, with an arrow for which numbers are better."""
    column = sweep.columns[name]
    arrow = "" if column.metric in FACTS else " ↓" if column.better == "lower" else " ↑"
    return f"{column.title or name}{arrow}"


def _ours(sweep: Sweep, name: str) -> list[Cell]:
    """Return our numbers of a column, with the best of a task in bold where the seeds separate it from the others."""
    column = sweep.columns[name]
    best = set() if column.metric in FACTS else sweep.best(column)
    shown = []
    for row in sweep.rows:
        value = measure_column(row, column)
        if value is None:
            shown.append(Cell(MISSING if column.metric and not row.any_complete else DASH))
            continue
        text = number_text(value.mean, column.digits)
        if value.deviation is not None and column.metric not in FACTS:
            text += f" ± {number_text(value.deviation, column.digits)}"
        partly = f" ({value.count} of {len(row.points)})" if value.count < len(row.points) else ""
        shown.append(Cell(f"{text}{partly}", row.label in best))
    return shown


def _papers(sweep: Sweep, name: str) -> list[Cell]:
    digits = sweep.columns[name].digits
    texts = [(number_text(row.paper.get(name), digits), row.points[0].spreads.get(name)) for row in sweep.rows]
    return cells(
        [text if deviation is None else f"{text} ± {number_text(deviation, digits)}" for text, deviation in texts]
    )


def _differences(sweep: Sweep, name: str) -> list[Cell]:
    column, shown = sweep.columns[name], []
    for row in sweep.rows:
        ours, printed = measure_column(row, column), row.paper.get(name)
        value = None if ours is None or printed is None else ours.mean - printed
        shown.append(Cell(signed_text(value, column.digits)))
    return shown


def differences_from_baseline(sweep: Sweep) -> list[str]:
    """Return a table of the first column's differences from the baseline's row, in Markdown; empty for a single row.

    Our differences have 95% intervals, with the deviation between seeds pooled over the rows of a series.
    """
    name, column = sweep.first
    differences = sweep.differences()
    references = {entry.reference.label for entry in differences if entry.reference is not None}
    if not references:
        return []
    against, printed = len(references) > 1, sweep.is_printed(name)
    rows = []
    for entry in differences:
        texts = [entry.row.label]
        if against:
            texts.append(DASH if entry.reference is None else entry.reference.label)
        texts.append(difference_text(entry, column))
        if printed:
            texts.append(signed_text(entry.paper, column.digits))
        rows.append(cells(texts))
    head = ["", *(["against"] if against else []), "ours", *(["paper"] if printed else [])]
    table = markdown(Table(head, rows, f"{column.title or name}, against {references_text(differences)}"))
    if column.metric in FACTS or all(entry.ours is None or entry.ours.interval is None for entry in differences):
        return [table]
    return [
        table,
        "In brackets: the 95% interval over seeds, by Student's t, of the differences between runs with the same seed; "
        f"their variance is pooled over the rows of a series{sweep.luck_text}.",
    ]


def difference_text(entry: Difference, column: Column) -> str:
    """Return a difference with the bounds of its 95% interval, as in `-0.0500 [-0.0712, -0.0288]`."""
    number, reference = entry.ours, entry.reference
    if number is None:
        is_missing = reference is not None and not (entry.row.any_complete and reference.any_complete)
        return MISSING if is_missing else DASH
    shown = signed_text(number.mean, column.digits)
    if column.metric in FACTS:
        return shown
    if number.count == 0:
        return f"{shown} (other seeds)"
    return with_interval(number, column.digits, signed_text)


def with_interval(number: Measured, digits: int, text: Callable[[float, int], str]) -> str:
    """Return a number with the bounds of its 95% interval if it has one. text: writes a number with so many digits."""
    if number.interval is None:
        return text(number.mean, digits)
    low, high = (text(number.mean + side * number.interval, digits) for side in (-1, 1))
    return f"{text(number.mean, digits)} [{low}, {high}]"
