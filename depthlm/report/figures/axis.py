"""The position of a row on an axis: a setting of its points, or a number of its run."""

from collections.abc import Sequence

from depthlm.config.experiment import Column
from depthlm.counts import parse_count
from depthlm.report.rows import Row, measured, paper
from depthlm.report.series import reference_of
from depthlm.report.sweep import Sweep


def setting(row: Row, name: str) -> str | None:
    """Return a setting of a row, or a quotient `a / b` of two settings; None where the row lacks it.

    A quotient has one decimal, or none from 10 on, so that widths rounded to a multiple of 16 share their cells.
    """
    if " / " not in name:
        return row.settings.get(name)
    numerator, _, denominator = name.partition(" / ")
    numbers = [as_number(row.settings.get(part, "")) for part in (numerator, denominator)]
    if numbers[0] is None or not numbers[1]:
        return None
    quotient = numbers[0] / numbers[1]
    return f"{quotient:.0f}" if quotient >= 10 else f"{round(quotient, 1):g}"


def axis_title(name: str) -> str:
    """Return the title of an axis: the last part of a setting's name, or of two settings' names."""
    return " / ".join(part.rpartition(".")[2].replace("_", " ") for part in name.split(" / "))


def is_setting(sweep: Sweep, name: str) -> bool:
    """Return whether an axis is a setting of the points; otherwise it is a number of summary.json."""
    return any(setting(row, name) is not None for row in sweep.rows)


def as_number(text: str) -> float | None:
    """Return a setting as a number, also in the form `10B`; None where it is not a number."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return float(parse_count(text))
    except ValueError:
        return None


def ordered(values: Sequence[str]) -> list[str]:
    """Return the distinct settings, ascending where all are numbers, else in their given order."""
    distinct = list(dict.fromkeys(values))
    numbers = {value: as_number(value) for value in distinct}
    if any(number is None for number in numbers.values()):
        return distinct
    return sorted(distinct, key=lambda value: numbers[value] or 0.0)


def place(sweep: Sweep, row: Row, name: str) -> float | str | None:
    """Return the position of our number of a row on an axis: a number, or a setting as text; None if unknown."""
    if not is_setting(sweep, name):
        number = measured(row, Column(metric=name))
        return None if number is None else number.mean
    text = setting(row, name)
    every = [value for other in sweep.rows if (value := setting(other, name)) is not None]
    return text if text is None or any(as_number(value) is None for value in every) else as_number(text)


def paper_place(sweep: Sweep, row: Row, name: str) -> float | str | None:
    """Return the position of the paper's number: from the setting, the paper's number, or ours under its protocol.

    Where a paper prints one parameter count for a pair of models, it is the baseline's.
    """
    if is_setting(sweep, name):
        return place(sweep, row, name)
    for column_name, column in sweep.columns.items():
        for of in (row, reference_of(row, sweep.rows, sweep.experiment)):
            value = None if of is None else paper(of, column_name)
            if column.metric == name and value is not None:
                return value * column.scale
    return place(sweep, row, name) if sweep.as_printed else None
