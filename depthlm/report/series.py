"""The grouping of rows: series, tasks, and the baseline's row with which a row is compared."""

import re
from collections.abc import Sequence

from depthlm.config.experiment import Column, Experiment
from depthlm.report.rows import Measured, Row, difference, pooled

# settings that define the task: rows that differ in them are not compared
TASK = ("size", "data", "training", "backbone", "budget")


def series_of(row: Row, experiment: Experiment) -> str:
    """Return the series of a row: the value of its setting `experiment.series`, or its label without that setting."""
    return row.settings.get(experiment.series, row.label)


def task(row: Row, experiment: Experiment) -> dict[str, str]:
    """Return the settings of a row that define its task, such as its size."""
    return {
        name: value
        for name, value in row.settings.items()
        if re.split(r"[./]", name)[0] in TASK and name != experiment.series
    }


def reference_of(row: Row, rows: Sequence[Row], experiment: Experiment) -> Row | None:
    """Return the baseline's row with which a row is compared: of the same task, with the most settings in common.

    Where a paper pairs models of different shapes, the labels decide: `MoDA 700M` is compared with `OLMo2 700M`. Where
    no row is the baseline, the first row of the same task is used; None where there is no row to compare with.
    """
    own = task(row, experiment)

    def same_task(other: Row) -> bool:
        return all(own.get(name, value) == value for name, value in task(other, experiment).items())

    baselines = [other for other in rows if experiment.baseline in (series_of(other, experiment), other.label)]
    if not baselines:
        return next((other for other in rows if same_task(other)), None)
    if row in baselines:
        return row

    def likeness(other: Row) -> tuple[bool, int, int]:
        shared = _numbered(row.label) & _numbered(other.label)
        return same_task(other), len(shared), len(row.settings.items() & other.settings.items())

    best = max(baselines, key=likeness)
    return best if any(likeness(best)[:2]) else None


def differences(rows: Sequence[Row], experiment: Experiment, column: Column) -> list[Measured | None]:
    """Return the difference of each row from its reference, with the deviation pooled over the rows of a series.

    None for a reference itself, and where either has no number.
    """
    found: list[Measured | None] = []
    for row in rows:
        reference = reference_of(row, rows, experiment)
        found.append(None if reference is None or reference is row else difference(row, reference, column))
    series = [series_of(row, experiment) for row in rows]
    result: list[Measured | None] = [None] * len(found)
    for name in dict.fromkeys(series):
        places = [place for place, of in enumerate(series) if of == name]
        for place, number in zip(places, pooled([found[place] for place in places]), strict=True):
            result[place] = number
    return result


def _numbered(label: str) -> set[str]:
    """Return the words of a label that contain a digit, such as `700M`."""
    return {word for word in label.replace(",", " ").split() if re.search(r"\d", word)}


def series_names(rows: Sequence[Row], experiment: Experiment) -> dict[str, str]:
    """Return each series' name: the first words that its rows' labels share, except values of settings."""
    names = {}
    for series in dict.fromkeys(series_of(row, experiment) for row in rows):
        members = [row for row in rows if series_of(row, experiment) == series]
        values = {value.lower() for row in members for name, value in row.settings.items() if name != experiment.series}
        shared: list[str] = []
        for words in zip(*(row.label.split() for row in members), strict=False):
            if len(set(words)) == 1 and words[0].strip(",").lower() not in values:
                shared.append(words[0])
            elif shared:
                break
        names[series] = " ".join(shared).strip(",") or series
    # two series never share a name
    return {series: name if list(names.values()).count(name) == 1 else series for series, name in names.items()}
