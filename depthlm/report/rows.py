"""The rows of a sweep and their numbers over seeds; points that differ only in the seed form one row."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, mean, stdev

import numpy as np

from depthlm.config.experiment import Column
from depthlm.config.names import setting_texts
from depthlm.runs.records import COMPLETE, RunRecord, Validation, ValidationLosses, read_run, with_one_source
from depthlm.sweeps.best import group_of
from depthlm.sweeps.point import Point

# metrics that describe a run but not its quality
FACTS = {"parameters", "tokens", "steps", "training_flops", "forward_flops_per_token"}


@dataclass(frozen=True)
class Row:
    """Points that differ only in the seed, and their runs. parts: of its label, which no other row has."""

    points: list[Point]
    runs: list[RunRecord]
    parts: dict[str, str]

    @property
    def label(self) -> str:
        """The label in a table of all rows."""
        return ", ".join(self.parts.values())

    @property
    def settings(self) -> dict[str, str]:
        """The settings without the seed."""
        return {name: value for name, value in self.points[0].settings.items() if name != "seed"}

    @property
    def seeds(self) -> list[str]:
        """The seed of each run."""
        return [point.seed or point.default_seed for point in self.points]

    @property
    def paper(self) -> dict[str, float | None]:
        """The paper's numbers, by column."""
        return self.points[0].paper

    @property
    def any_complete(self) -> bool:
        """Whether a run is complete."""
        return any(run.state == COMPLETE for run in self.runs)


@dataclass(frozen=True)
class Measured:
    """A number over seeds: mean, sample standard deviation (None for one seed), number of seeds.

    A difference of runs without a common seed has a count of 0. freedom: degrees of freedom of the deviation; None: one
    less than the seeds. luck: the standard deviation of the mean that comes from the choice of a value (`choice_luck`).
    """

    mean: float
    deviation: float | None
    count: int
    freedom: int | None = None
    luck: float = 0.0

    @property
    def interval(self) -> float | None:
        """Half the width of the mean's 95% confidence interval; None without a deviation."""
        return self.half_width(0.95)

    def half_width(self, level: float) -> float | None:
        """Return half the width of the mean's confidence interval; None without a deviation.

        It is that of Student's t over the seeds, and that of a normal distribution for the luck, added by squares.
        """
        if self.deviation is None:
            return None
        seeds = student_t(self.freedom or self.count - 1, level) * self.deviation / math.sqrt(self.count)
        return math.hypot(seeds, normal_quantile(level) * self.luck) if self.luck else seeds


def student_t(freedom: int, level: float = 0.95) -> float:
    """Return the two-sided quantile of Student's t distribution, such as 4.303 for two degrees of freedom."""
    from scipy.stats import t

    return float(t.ppf((1 + level) / 2, freedom))


def normal_quantile(level: float) -> float:
    """Return the two-sided quantile of the normal distribution, such as 1.96 for a level of 0.95."""
    return NormalDist().inv_cdf((1 + level) / 2)


def choice_luck(means: Sequence[float], error: float) -> float:
    """Return the standard deviation of the loss of the chosen value, if the runs that choose were run again.

    means: of the loss of each value, over the seeds that choose. error: the standard error of such a mean. Each mean is
    taken as normally distributed around the observed one, independent of the others; the lowest chooses a value, whose
    loss is its observed mean. This is the limit of a parametric bootstrap.
    """
    from scipy.stats import norm

    if len(means) < 2 or not error:
        return 0.0
    observed = np.asarray(means)
    x = np.linspace(observed.min() - 8 * error, observed.min() + 8 * error, 2001)[:, None]
    above = norm.sf(x, observed, error)
    # the density of each value's mean, times the chance that all others are above it
    lowest = [norm.pdf(x[:, 0], mean, error) * np.delete(above, i, 1).prod(1) for i, mean in enumerate(observed)]
    chances = np.sum(lowest, 1) / np.sum(lowest)
    return float(np.sqrt(chances @ (observed - chances @ observed) ** 2))


def luck_of(
    rows: Sequence[Row], selection: Sequence[Row], column: Column, seeds: int | None = None
) -> dict[str, float]:
    """Return the standard deviation that the choice of a value adds to the column of each row, by its label.

    rows: of one series, whose pooled deviation over seeds is taken to be that of the runs that choose. selection: the
    rows of these. seeds: over how many a mean of them is; None: as many as they have. 0 where nothing was chosen, or
    where no row has two seeds.
    """
    known = pool_deviations([measure_column(row, column) for row in rows])
    grids: dict[frozenset[tuple[str, str]], list[Row]] = {}
    for each in selection:
        grids.setdefault(group_of(each.points[0]), []).append(each)
    luck = {}
    for row, measured in zip(rows, known, strict=True):
        grid = grids.get(group_of(row.points[0]), [])
        # a value that diverged with a seed is not chosen
        losses = [list(values) for each in grid if len(values := by_seed(each, column).values()) == len(each.runs)]
        sign = 1 if column.better == "lower" else -1
        deviation = (measured.deviation if measured else None) or 0.0
        error = deviation / math.sqrt(seeds or len(losses[0])) if losses else 0.0
        luck[row.label] = choice_luck([sign * fmean(values) for values in losses], error)
    return luck


def pool_deviations(numbers: Sequence[Measured | None]) -> list[Measured | None]:
    """Return the numbers with the deviation of all of them, since a few seeds alone hardly determine it.

    Assumes that the variance between seeds is the same for all. Numbers of one seed get the deviation of the others;
    differences without a common seed, and missing numbers, stay as they are.
    """
    known = [(n.count - 1, n.deviation) for n in numbers if n is not None and n.deviation is not None]
    freedom = sum(seeds for seeds, _ in known)
    if not freedom:
        return list(numbers)
    common = math.sqrt(sum(seeds * deviation**2 for seeds, deviation in known) / freedom)
    return [replace(n, deviation=common, freedom=freedom) if n is not None and n.count else n for n in numbers]


def gather(points: Sequence[Point], read: Callable[[str], RunRecord] = read_run) -> list[Row]:
    """Return the rows of a sweep, in the order of its points, with the record of each run, read by its directory.

    All rows have a metric from the same file of their runs.
    """
    groups: dict[frozenset[tuple[str, str]], list[Point]] = {}
    for point in points:
        key = frozenset((name, value) for name, value in point.settings.items() if name != "seed")
        groups.setdefault(key, []).append(point)
    runs = iter(with_one_source([read(point.directory) for members in groups.values() for point in members]))
    rows = [
        Row(members, [next(runs) for _ in members], members[0].parts or {"model": members[0].mechanism})
        for members in groups.values()
    ]
    return label_rows(rows)


def label_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with labels of their own: those that several rows have get the settings in which these differ."""
    return with_unique_labels([replace(row, parts=row.parts | _find_distinguishing(row, rows)) for row in rows])


def with_unique_labels(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with a number in the labels that several of them have, since numbers are looked up by label."""
    labels = [row.label for row in rows]
    return [
        row if labels.count(row.label) == 1 else replace(row, parts=row.parts | {"row": f"row {number}"})
        for number, row in enumerate(rows)
    ]


def _find_distinguishing(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    """Return the settings in which a row differs from others with the same label, as parts of its label."""
    alike = [other.settings for other in rows if other.label == row.label]
    return {
        name: setting_texts(name, [settings.get(name, "") for settings in alike])[value]
        for name, value in sorted(row.settings.items())
        if any(settings.get(name) != value for settings in alike)
    }


def by_seed(row: Row, column: Column) -> dict[str, float]:
    """Return the column's number of each seed that has one, in the paper's unit."""
    values = {seed: run.number(column.metric, column.at) for seed, run in zip(row.seeds, row.runs, strict=True)}
    return {seed: value / column.scale for seed, value in values.items() if value is not None}


def measure_column(row: Row, column: Column) -> Measured | None:
    """Return the column's number over the seeds that have one, in the paper's unit."""
    return over_seeds(list(by_seed(row, column).values()))


def difference(row: Row, reference: Row, column: Column, scale: Callable[[float], float] = float) -> Measured | None:
    """Return row minus reference over their common seeds; without any, of the means, with a count of 0.

    scale: applied to each number first, such as math.log for the log of their ratio.
    """
    numbers, base = by_seed(row, column), by_seed(reference, column)
    paired = [scale(numbers[seed]) - scale(base[seed]) for seed in numbers if seed in base]
    if paired or not numbers or not base:
        return over_seeds(paired)
    return Measured(scale(mean(numbers.values())) - scale(mean(base.values())), None, 0)


def over_seeds(values: Sequence[float]) -> Measured | None:
    """Return the mean and deviation of the numbers of some seeds, or None without any."""
    if not values:
        return None
    return Measured(mean(values), stdev(values) if len(values) > 1 else None, len(values))


def paper_difference(row: Row, reference: Row, name: str) -> float | None:
    """Return the paper's difference between two rows, or None where it does not print both."""
    number, base = row.paper.get(name), reference.paper.get(name)
    return None if number is None or base is None else number - base


def times_to_baseline(row: Row, baseline: Row) -> list[float | None]:
    """Return when each run of a row first has the baseline's last validation loss (Table 1 of arXiv 2502.06785).

    It is the training time as a share of the baseline's; None if a run never has the loss.

    Both are those of the baseline's run with the same seed, or means over its complete runs where it has no such run;
    None where the last validation of one of these is not finite. The time is that of a validation, so it is exact to
    the steps between two of them. A run and its baseline must be complete.
    """
    ends: dict[str, Validation | None] = {}
    for seed, run in zip(baseline.seeds, baseline.runs, strict=True):
        steps = [row["step"] for row in run.rows if ValidationLosses.of_row(row)]
        if run.state == COMPLETE and steps:
            # run.validations has only those that are finite
            ends[seed] = next((validation for validation in run.validations if validation.step == steps[-1]), None)
    return [
        _time(run, [ends[seed]] if seed in ends else [*ends.values()])
        for seed, run in zip(row.seeds, row.runs, strict=True)
    ]


def _time(run: RunRecord, ends: list[Validation | None]) -> float | None:
    """Return the share of the mean time of these validations after which a run has at most their mean loss."""
    known = [end for end in ends if end is not None]
    totals = [end.seconds for end in known if end.seconds]
    if run.state != COMPLETE or not totals or len(known) < len(ends):
        return None
    loss = fmean(end.loss for end in known)
    seconds = next((validation.seconds for validation in run.validations if validation.loss <= loss), None)
    return None if seconds is None else seconds / fmean(totals)
