"""Where a row stands along an axis: a setting of the points, or a number of its run."""

from collections.abc import Sequence

from depthlm.config.schema.experiment import Column
from depthlm.counts import parse_count
from depthlm.report.rows import Row, measured, paper
from depthlm.report.series import reference_of
from depthlm.report.sweep import Sweep


def setting(row: Row, name: str) -> str | None:
    """A setting of a row, or the quotient of two of them, `a / b`, to one decimal; None where the row lacks it."""
    if " / " not in name:
        return row.settings.get(name)
    above, _, below = name.partition(" / ")
    numbers = [as_number(row.settings.get(part, "")) for part in (above, below)]
    if numbers[0] is None or not numbers[1]:
        return None
    return f"{round(numbers[0] / numbers[1], 1):g}"


def axis_title(name: str) -> str:
    """What an axis is called: the last part of a setting's name, or of two."""
    return " / ".join(part.rpartition(".")[2].replace("_", " ") for part in name.split(" / "))


def is_setting(sweep: Sweep, name: str) -> bool:
    """Whether an axis is a setting of the points, else it is a number of summary.json."""
    return any(setting(row, name) is not None for row in sweep.rows)


def as_number(text: str) -> float | None:
    """A setting as a number, `10B` too, else None."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return float(parse_count(text))
    except ValueError:
        return None


def ordered(values: Sequence[str]) -> list[str]:
    """Distinct settings, smallest first where all are numbers, else as they come."""
    found = list(dict.fromkeys(values))
    numbers = {value: as_number(value) for value in found}
    if any(number is None for number in numbers.values()):
        return found
    return sorted(found, key=lambda value: numbers[value] or 0.0)


def place(sweep: Sweep, row: Row, name: str) -> float | str | None:
    """Where our number of a row stands along an axis: a number, or a setting in words; None where it has no place."""
    if not is_setting(sweep, name):
        found = measured(row, Column(metric=name))
        return None if found is None else found.mean
    text = setting(row, name)
    every = [value for other in sweep.rows if (value := setting(other, name)) is not None]
    return text if text is None or any(as_number(value) is None for value in every) else as_number(text)


def paper_place(sweep: Sweep, row: Row, name: str) -> float | str | None:
    """Where the paper's number of a row stands: by its setting, the paper's own number, or ours under its protocol.

    A paper that prints one count of parameters for a pair of models prints the baseline's.
    """
    if is_setting(sweep, name):
        return place(sweep, row, name)
    for column_name, column in sweep.columns.items():
        for of in (row, reference_of(row, sweep.rows, sweep.experiment)):
            value = None if of is None else paper(of, column_name)
            if column.metric == name and value is not None:
                return value * column.scale
    return place(sweep, row, name) if sweep.as_printed else None
