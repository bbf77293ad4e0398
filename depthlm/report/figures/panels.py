"""The panels of the loss curves: one per task, such as a model size, with a curve for each row."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from depthlm.report.figures.axis import axis_title
from depthlm.report.mechanism import Mechanism, mechanism_of
from depthlm.report.rows import Row
from depthlm.report.series import reference_of, task
from depthlm.report.sweep import Sweep
from depthlm.runs.records import RunRecord


@dataclass(frozen=True)
class LossCurve:
    """Runs that differ only in the seed. mechanism: its colour is that of the curve."""

    name: str
    mechanism: Mechanism
    runs: list[RunRecord]


@dataclass(frozen=True)
class Panel:
    """The loss curves of one task."""

    title: str
    curves: list[LossCurve]


def panels_of(sweep: Sweep) -> list[Panel]:
    """Return a panel for each group of rows that are compared with the same baseline, in the order of the rows.

    Where no row is compared with another one, there is a panel for each model size.
    """
    groups = _grouped(sweep.rows, [_compared(sweep, row) for row in sweep.rows])
    sizes = [config.size.name for config in sweep.configs]
    if len(groups) == 1:
        title = sizes[0] if len(set(sizes)) == 1 else ""
        return [_panel(title, sweep.rows, [row.label for row in sweep.rows])]
    titles = _titles(sweep, groups)
    if len(groups) == len(sweep.rows):
        groups, titles = _grouped(sweep.rows, sizes), list(dict.fromkeys(sizes))
    return [_panel(title, rows, _without_shared_words(rows)) for title, rows in zip(titles, groups, strict=True)]


def _panel(title: str, rows: Sequence[Row], names: Sequence[str]) -> Panel:
    return Panel(title, [LossCurve(name, mechanism_of(row), row.runs) for row, name in zip(rows, names, strict=True)])


def _compared(sweep: Sweep, row: Row) -> str:
    """Return the label of the baseline's row with which a row is compared; its own task where there is none."""
    reference = reference_of(row, sweep.rows, sweep.experiment)
    return str(sorted(task(row, sweep.experiment).items())) if reference is None else reference.label


def _grouped(rows: Sequence[Row], keys: Sequence[Hashable]) -> list[list[Row]]:
    groups: dict[Hashable, list[Row]] = {}
    for row, key in zip(rows, keys, strict=True):
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _titles(sweep: Sweep, groups: Sequence[Sequence[Row]]) -> list[str]:
    """Return what distinguishes the groups: one setting if that is enough, else the words that their labels share.

    Where neither does, it is the label of each group's first row.
    """
    settings = [[row.settings for row in rows] for rows in groups]
    tasks = [name for row in sweep.rows for name in task(row, sweep.experiment)]
    others = [name for row in sweep.rows for name in row.settings if name != sweep.experiment.series]
    for name in sorted(dict.fromkeys([*tasks, *others]), key=lambda name: name != "size"):
        values = [{of_row.get(name) for of_row in of_group} for of_group in settings]
        texts = [value for of_group in values for value in of_group if value is not None]
        if all(len(of_group) == 1 for of_group in values) and len(set(texts)) == len(groups):
            # the value of a group, `size=tiny`, says what it is; a number does not
            return texts if "." not in name else [f"{axis_title(name)} {text}" for text in texts]
    titles = [" ".join(_shared_words(rows)).strip(",") for rows in groups]
    clear = len(set(titles)) == len(titles) and all(any(letter.isalpha() for letter in title) for title in titles)
    return titles if clear else [rows[0].label for rows in groups]


def _shared_words(rows: Sequence[Row]) -> list[str]:
    """Return the words of the first label that all labels contain."""
    others = [{word.strip(",") for word in row.label.split()} for row in rows]
    return [word for word in rows[0].label.split() if all(word.strip(",") in words for words in others)]


def _without_shared_words(rows: Sequence[Row]) -> list[str]:
    """Return the labels without the words that all of them share, where the rest still distinguishes them."""
    shared = {word.strip(",") for word in _shared_words(rows)}
    rest = [[word for word in row.label.split() if word.strip(",") not in shared] for row in rows]
    names = [" ".join(words).strip(",") for words in rest]
    clear = len(set(names)) == len(names) and all(any(letter.isalpha() for letter in name) for name in names)
    return names if clear else [row.label for row in rows]
