"""The sweep of a report: the experiment, its rows, and the row with which each is compared."""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import depthlm
from depthlm.config.experiment import VALIDATION_LOSS, Column, Experiment
from depthlm.config.keys import on_resume
from depthlm.config.names import by_name, experiment_of, normal_value, short_key
from depthlm.config.schema import Config
from depthlm.counts import count_text, format_count
from depthlm.errors import ConfigError, UserError, join_names, nearest
from depthlm.report.rows import (
    Measured,
    Row,
    difference,
    gather,
    luck_of,
    measure_column,
    paper_difference,
    pool_deviations,
    times_to_baseline,
)
from depthlm.runs.records import COMPLETE, RunRecord, read_run
from depthlm.sweeps.best import Undecided, as_trained, find_undecided, selection_column
from depthlm.sweeps.points import expand, load_experiment, parse_value, sweep_points

# metrics that reports derive from several runs or columns
TIME_TO_BASELINE, AVERAGE_PERPLEXITY = "time_to_baseline", "validation/average_perplexity"
# the updates below which the differences between runs mean nothing, and those below which they do with a single seed
FEW_UPDATES, FEW_OF_ONE_SEED = 100, 1000
# the default columns of an experiment
LOSS = {"loss": VALIDATION_LOSS}


@dataclass(frozen=True)
class Series:
    """Rows that differ in the task. key: their value of the experiment's `series`. name: for figures."""

    key: str
    name: str
    rows: list[Row]


@dataclass(frozen=True)
class Difference:
    """How a row's first column differs from its reference, ours and the paper's; None where either has no number."""

    row: Row
    reference: Row | None
    ours: Measured | None
    paper: float | None


@dataclass(frozen=True)
class Sweep:
    """An experiment with its rows. columns: never empty; the first is what the figure draws.

    configs: the configuration of each row; rows of one task and optimizer share one. changed: the settings from the
    command line that the experiment's points do not have. selection: the rows whose runs choose a value.
    """

    experiment: Experiment
    rows: list[Row]
    columns: dict[str, Column]
    configs: list[Config]
    changed: list[str]
    selection: list[Row] = field(default_factory=list)

    @property
    def runs(self) -> list[RunRecord]:
        """The runs of all rows."""
        return [run for row in self.rows for run in row.runs]

    @property
    def every_run(self) -> list[RunRecord]:
        """The runs that choose, and those of all rows."""
        return [run for row in (*self.selection, *self.rows) for run in row.runs]

    @property
    def undecided(self) -> list[Undecided]:
        """The groups that have not chosen a value."""
        chosen = ((point, run) for row in self.selection for point, run in zip(row.points, row.runs, strict=True))
        records = {point.directory: run for point, run in chosen}
        points = [point for row in [*self.selection, *self.rows] for point in row.points]
        return find_undecided(points, records.__getitem__)

    @property
    def first(self) -> tuple[str, Column]:
        """The column that the figure draws, by name."""
        return next(iter(self.columns.items()))

    @property
    def trial(self) -> str | None:
        """Why the differences between these runs mean nothing, as a sentence; None where they may mean something."""
        updates = max((run.number("steps") or 0 for run in self.runs if run.state == COMPLETE), default=None)
        seeds = max((len(row.runs) for row in self.rows), default=0)
        if updates is None or updates >= (FEW_OF_ONE_SEED if seeds == 1 else FEW_UPDATES):
            return None
        trained = f"{format_count(round(updates), 'update')} and {format_count(seeds, 'seed')}"
        return f"This tests the commands; its differences mean nothing: the runs have {trained}."

    @property
    def as_printed(self) -> bool:
        """Whether the runs follow the paper's whole protocol."""
        return not self.changed and all(config.budget.name == "paper" for config in self.configs)

    def is_printed(self, name: str) -> bool:
        """Return whether the paper has numbers in a column."""
        return any(row.paper.get(name) is not None for row in self.rows)

    def shape_of(self, row: Row) -> tuple[str, str, str]:
        """Return the name of the size of a row's models, its layers and its width; empty where they are unknown."""
        if self.configs:
            size = self.configs[self.rows.index(row)].size
            return size.name, str(size.num_layers), str(size.hidden_size)
        given = row.settings
        return given.get("size", ""), given.get("size.num_layers", ""), given.get("size.hidden_size", "")

    def series_of(self, row: Row) -> str:
        """Return a row's value of the experiment's `series`, or its mechanism where it has no such setting."""
        mechanism = row.points[0].mechanism
        return mechanism if self.experiment.series == "model" else row.settings.get(self.experiment.series, mechanism)

    @property
    def series(self) -> list[Series]:
        """The series, in the order of the rows.

        A series is named by the label that all of its points have in the experiment's file, or by its value.
        """
        members: dict[str, list[Row]] = {}
        for row in self.rows:
            members.setdefault(self.series_of(row), []).append(row)
        labels = {key: {row.parts.get("label", key) for row in rows} for key, rows in members.items()}
        names = [next(iter(texts)) if len(texts) == 1 else key for key, texts in labels.items()]
        return [
            Series(key, name if names.count(name) == 1 else key, rows)
            for (key, rows), name in zip(members.items(), names, strict=True)
        ]

    def is_baseline(self, row: Row) -> bool:
        """Return whether the others are compared with a row: the experiment names its series, or its label."""
        return row.label == self.experiment.baseline or self.is_baseline_series(self.series_of(row))

    def is_baseline_series(self, key: str) -> bool:
        """Return whether the experiment names a series, by this value, as the baseline."""
        series, baseline = self.experiment.series, self.experiment.baseline
        return normal_value(series, key) == normal_value(series, baseline)

    def task_of(self, row: Row) -> dict[str, str]:
        """Return the task at which a row is compared: its name, or the settings that define it."""
        without = self.experiment.series, self.experiment.best_over
        return {name: value for name, value in row.points[0].task.items() if name not in without}

    def reference_of(self, row: Row) -> Row | None:
        """Return the baseline's row of the same task with the most settings, but the chosen one, then seeds in common.

        Where no row is the baseline, it is the first row of the same task. None where there is no row to compare with.
        """
        task, chosen = self.task_of(row), self.experiment.best_over
        baselines = [other for other in self.rows if self.is_baseline(other)]
        if row in baselines:
            return row
        alike = [
            other
            for other in baselines or self.rows
            if all(task.get(name, value) == value for name, value in self.task_of(other).items())
        ]
        if not baselines:
            return next(iter(alike), None)
        given = {(name, value) for name, value in row.settings.items() if name != chosen}
        return max(
            alike,
            key=lambda other: (len(given & other.settings.items()), len({*row.seeds} & {*other.seeds})),
            default=None,
        )

    @property
    def tasks(self) -> list[list[Row]]:
        """The rows in groups of one task."""
        groups: dict[Hashable, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(frozenset(self.task_of(row).items()), []).append(row)
        return list(groups.values())

    @cached_property
    def _references(self) -> list[tuple[Row, Row | None]]:
        """Each row but the references, and the row with which it is compared."""
        pairs = [(row, self.reference_of(row)) for row in self.rows]
        return [(row, reference) for row, reference in pairs if row is not reference]

    def differences(self) -> list[Difference]:
        """Return the difference of each row but the references, with the deviation pooled over the rows of a series."""
        name, column = self.first
        return [
            Difference(row, other, ours, None if other is None else paper_difference(row, other, name))
            for (row, other), ours in zip(self._references, self._measure_pairs(self._references, column), strict=True)
        ]

    def best(self, column: Column) -> set[str]:
        """Return the label of the best row of each task that the seeds separate from all others of the task.

        They do where no 95% interval of its difference from another row contains 0; between a row and its reference, it
        is the interval that `differences` has for the column. None of a trial is best.
        """
        if self.trial:
            return set()
        sign = 1 if column.better == "lower" else -1
        known = {}
        for (row, other), ours in zip(self._references, self._measure_pairs(self._references, column), strict=True):
            if other is not None and ours is not None:
                known[row.label, other.label] = ours
                known[other.label, row.label] = replace(ours, mean=-ours.mean)
        labels = set()
        for rows in self.tasks:
            means = {row.label: sign * value.mean for row in rows if (value := measure_column(row, column)) is not None}
            if len(means) < 2:
                continue
            best = min((row for row in rows if row.label in means), key=lambda row: means[row.label])
            others = [row for row in rows if row.label in means and row is not best]
            own = self._measure_pairs([(row, best) for row in others], column)
            worse = [known.get((row.label, best.label), ours) for row, ours in zip(others, own, strict=True)]
            if all(ours and ours.interval is not None and sign * ours.mean > ours.interval for ours in worse):
                labels.add(best.label)
        return labels

    def pooled_numbers(self) -> dict[str, Measured | None]:
        """Return the first column's number of each row by its label; the deviation is pooled over a task's rows."""
        numbers: dict[str, Measured | None] = {}
        for rows in self.tasks:
            known = pool_deviations([measure_column(row, self.first[1]) for row in rows])
            for row, measured in zip(rows, known, strict=True):
                numbers[row.label] = measured and replace(measured, luck=self.luck[row.label])
        return numbers

    @property
    def luck_text(self) -> str:
        """What the intervals of this sweep contain beside the deviation over seeds; empty if nothing was chosen."""
        return ", with the luck of the choices" if any(self.luck.values()) else ""

    @cached_property
    def luck(self) -> dict[str, float]:
        """The standard deviation that the choice of a value adds to the first column of each row, by its label."""
        column = self.first[1]
        chooses = [run for row in self.selection for run in row.runs]
        selection = self.selection if chooses and selection_column(self.experiment, chooses) == column else []
        return {label: luck for each in self.series for label, luck in luck_of(each.rows, selection, column).items()}

    def _measure_pairs(self, pairs: Sequence[tuple[Row, Row | None]], column: Column) -> list[Measured | None]:
        """Return the difference of each pair; the deviation is pooled over pairs whose first rows are of one series."""
        ours = [None if other is None else difference(row, other, column) for row, other in pairs]
        members: dict[str, list[int]] = {}
        for place, (row, _) in enumerate(pairs):
            members.setdefault(self.series_of(row), []).append(place)
        for places in members.values():
            for place, pooled_one in zip(places, pool_deviations([ours[place] for place in places]), strict=True):
                ours[place] = pooled_one
        if column == self.first[1]:
            for place, (measured, (row, other)) in enumerate(zip(ours, pairs, strict=True)):
                if measured is not None and other is not None:
                    ours[place] = replace(measured, luck=math.hypot(self.luck[row.label], self.luck[other.label]))
        return ours

    def stamp(self, beside_paper: bool = False) -> str:
        """Return the line below a figure, for readers who see it without its report.

        That is the experiment, its budget where the paper's numbers or a smaller budget make it matter, the tokens and
        the seeds of its runs, and the version of depthlm. beside_paper: whether the figure also has the paper's
        numbers; if ours are not comparable with them, it says so.
        """
        budgets = " and ".join(dict.fromkeys(config.budget.name for config in self.configs))
        has_paper = bool(self.experiment.fits) or any(row.paper for row in self.rows)
        complete = {sum(run.state == COMPLETE for run in row.runs) for row in self.rows} - {0}
        tokens = {count for run in self.runs if (count := run.number("tokens")) is not None}
        changed = " with a changed protocol" if self.changed else ""
        texts = [
            self.experiment.name,
            f"budget {budgets}{changed}" if budgets and (has_paper or budgets != "paper") else "",
            f"{range_text(tokens)} tokens" if tokens else "",
            f"{range_text(complete)} seed{'s' * (max(complete) > 1)}" if complete else "no complete run",
            f"depthlm {depthlm.__version__}",
        ]
        text = ", ".join(filter(None, texts))
        return text if self.as_printed or not beside_paper else f"ours: {text}; not comparable with the paper's numbers"


def references_text(differences: Iterable[Difference], several: str = "the baseline of the same task") -> str:
    """Return the reference of the differences: the label of a row, or what `several` of them are."""
    labels = {entry.reference.label for entry in differences if entry.reference is not None}
    return labels.pop() if len(labels) == 1 else several


def range_text(numbers: Set[float]) -> str:
    """Return the least and the greatest number as counts, as in `369.1K to 394.8K`."""
    low, high = count_text(min(numbers)), count_text(max(numbers))
    return low if low == high else f"{low} to {high}"


def read_sweep(
    overrides: Sequence[str], config_dir: str | Path | None = None, read: Callable[[str], RunRecord] = read_run
) -> Sweep:
    """Return the sweep of these overrides, with the record of each run, read by its directory.

    Without `experiment=`, the experiment is empty. Raises ConfigError.
    """
    name = experiment_of(overrides)
    if name is not None and "," in name:
        raise ConfigError([f"experiment={name}: a report covers one experiment, like depth_attention/mixing_rule"])
    every_point = sweep_points(overrides, config_dir, read)
    texts = every_point[0].overrides if every_point else overrides
    experiment = Experiment() if name is None else load_experiment(name, config_dir, texts)
    choosing, points = ([point for point in every_point if point.selects is selects] for selects in (True, False))
    rows = gather(points, read)
    columns, configs = experiment.columns or LOSS, [row.points[0].config_elsewhere() for row in rows]
    changed = [] if name is None else _list_changed(overrides, experiment, rows)
    selection = gather(choosing, lambda directory: as_trained(read(directory)))
    return with_derived(Sweep(experiment, rows, columns, configs, changed, selection))


def with_derived(sweep: Sweep) -> Sweep:
    """Return the sweep with the numbers that its columns derive from several runs or columns, in the runs' summaries.

    These are `time_to_baseline`, and `validation/average_perplexity`: the mean perplexity of the validation sets that
    other columns have, None where one is missing.
    """
    metrics = {column.metric for column in sweep.columns.values()}
    if not metrics & {TIME_TO_BASELINE, AVERAGE_PERPLEXITY}:
        return sweep
    sets = [metric for metric in metrics if re.fullmatch(r"validation/.+/perplexity", metric)]
    rows = []
    for row in sweep.rows:
        reference, runs = sweep.reference_of(row), []
        is_known = reference is not None and sweep.is_baseline(reference)
        times = times_to_baseline(row, reference) if reference and is_known else [None] * len(row.runs)
        for run, time in zip(row.runs, times, strict=True):
            known = [value for metric in sets if (value := run.number(metric)) is not None]
            average = fmean(known) if known and len(known) == len(sets) else None
            derived = {TIME_TO_BASELINE: time, AVERAGE_PERPLEXITY: average}
            runs.append(replace(run, summary=run.summary | derived))
        rows.append(replace(row, runs=runs))
    return replace(sweep, rows=rows)


def with_baseline(sweep: Sweep, baseline: str | None) -> Sweep:
    """Return the sweep with another baseline: a row's label, a mechanism, or a setting, as in `optimizer.lr=1e-3`.

    Raises UserError if no row is this baseline.
    """
    if baseline is None:
        return sweep
    named = replace(sweep, experiment=replace(sweep.experiment, baseline=baseline))
    if any(map(named.is_baseline, named.rows)):
        return with_derived(named)
    key, _, value = baseline.partition("=")
    for series in {name: None for row in sweep.rows for name in row.settings if key in (name, short_key(name))}:
        by_setting = replace(sweep, experiment=replace(sweep.experiment, series=series, baseline=value))
        if any(map(by_setting.is_baseline, by_setting.rows)):
            return with_derived(by_setting)
    labels = [row.label for row in sweep.rows]
    # a label has commas of its own
    allowed = join_names(f"`{label}`" for label in labels)
    raise UserError(f"baseline={baseline}: no such row; allowed: {allowed}{nearest(baseline, labels)}")


def _list_changed(overrides: Sequence[str], experiment: Experiment, rows: Sequence[Row]) -> list[str]:
    """Return the overrides whose values no point of the experiment has."""
    lines = expand(experiment)
    changed = []
    for name, text in by_name(overrides).items():
        if on_resume(name) == "free" or name in ("seed", "budget"):
            continue
        known = [parse_value(line.settings[name]) for line in lines if name in line.settings]
        values = {row.settings[name]: None for row in rows if name in row.settings} or {text: None}
        changed += [f"{name}={value}" for value in values if parse_value(value) not in known]
    return changed
