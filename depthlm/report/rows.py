"""The rows of a sweep: points with their runs; points that differ only in the seed form one row."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev

from depthlm.config.experiment import Column
from depthlm.config.resolve import by_name
from depthlm.config.schema import Config
from depthlm.runs.records import RunRecord, read_run
from depthlm.streams import printable
from depthlm.sweeps.points import Point

# metrics that describe a run but not its quality
FACTS = {"parameters", "tokens", "steps", "training_flops", "forward_flops_per_token"}


@dataclass(frozen=True)
class Row:
    """A row of a table: points that differ only in the seed, and their runs. settings: without the seed."""

    label: str
    settings: dict[str, str]
    paper: dict[str, float | None]
    points: list[Point]
    runs: list[RunRecord]
    seeds: list[str]


@dataclass(frozen=True)
class Measured:
    """A number over seeds: mean, sample standard deviation (None for one seed), number of seeds.

    A difference of runs without a common seed has a count of 0. freedom: degrees of freedom of the deviation; None: one
    less than the seeds.
    """

    mean: float
    deviation: float | None
    count: int
    freedom: int | None = None

    @property
    def interval(self) -> float | None:
        """Half the width of the mean's 95% confidence interval, by Student's t; None without a deviation."""
        return self.half_width(0.95)

    def half_width(self, level: float) -> float | None:
        """Return half the width of the mean's confidence interval; None without a deviation."""
        if self.deviation is None:
            return None
        return student_t(self.freedom or self.count - 1, level) * self.deviation / math.sqrt(self.count)


def student_t(freedom: int, level: float = 0.95) -> float:
    """Return the two-sided quantile of Student's t distribution, such as 4.303 for two degrees of freedom."""
    from scipy.stats import t

    return float(t.ppf((1 + level) / 2, freedom))


def pooled(numbers: Sequence[Measured | None]) -> list[Measured | None]:
    """Return the numbers with the deviation of all of them, since a few seeds alone hardly determine it.

    Assumes that the variance between seeds is the same for all. Numbers of one seed get the deviation of the others;
    differences without a common seed, and missing numbers, stay as they are.
    """
    known = [(n.count - 1, n.deviation) for n in numbers if n is not None and n.deviation is not None]
    freedom = sum(seeds for seeds, _ in known)
    if not freedom:
        return list(numbers)
    deviation = math.sqrt(sum(seeds * own**2 for seeds, own in known) / freedom)
    return [replace(n, deviation=deviation, freedom=freedom) if n is not None and n.count else n for n in numbers]


def gather(points: Sequence[Point], read: Callable[[str], RunRecord] = read_run) -> list[Row]:
    """Return the rows of a sweep, in the order of its points, with the record of each run, read by its directory."""
    rows: dict[tuple[str, ...], Row] = {}
    for point in points:
        all_settings = point.settings or by_name(point.overrides)
        settings = {name: value for name, value in all_settings.items() if name != "seed"}
        key = tuple(f"{name}={value}" for name, value in sorted(settings.items()))
        label = point.label or printable(Path(point.directory).name)
        row = rows.setdefault(key, Row(label, settings, point.paper, [], [], []))
        row.points.append(point)
        row.runs.append(read(point.directory))
        row.seeds.append(all_settings.get("seed", str(Config().seed)))
    return _with_distinct_labels([replace(row, label=_without_seed(row)) for row in rows.values()])


def _without_seed(row: Row) -> str:
    """Return the row's label without the seed, where the points' labels differ only in the seed."""
    labels = {
        re.sub(rf"(,? |__seed-){re.escape(seed)}(?=$|,|\s|__)", "", point.label or printable(run.directory.name))
        for point, run, seed in zip(row.points, row.runs, row.seeds, strict=True)
    }
    return labels.pop() if len(labels) == 1 and len(row.points) > 1 else row.label


def _with_distinct_labels(rows: list[Row]) -> list[Row]:
    """Append the differing settings to the label of rows that share a label."""
    labelled = []
    for row in rows:
        same = [other.settings for other in rows if other.label == row.label]
        names = sorted({name for settings in same for name in settings})
        differ = [name for name in names if len({settings.get(name) for settings in same}) > 1]
        more = [f"{name}={row.settings[name]}" for name in differ if name in row.settings]
        labelled.append(replace(row, label=", ".join([row.label, *more])))
    return labelled


def number(run: RunRecord, metric: str, at: float = 1.0) -> float | None:
    """Return a finite number of a complete run, else None, also where its files are not those of a run."""
    try:
        value = run.number(metric, at)
    except (KeyError, TypeError, OverflowError):
        return None
    return None if value is None or not math.isfinite(value) else float(value)


def by_seed(row: Row, column: Column) -> dict[str, float]:
    """Return the column's number of each seed that has one, in the paper's unit."""
    values = {seed: number(run, column.metric, column.at) for seed, run in zip(row.seeds, row.runs, strict=True)}
    return {seed: value / column.scale for seed, value in values.items() if value is not None}


def measured(row: Row, column: Column) -> Measured | None:
    """Return the column's number over the seeds that have one, in the paper's unit."""
    return over_seeds(list(by_seed(row, column).values()))


def difference(row: Row, reference: Row, column: Column, scale: Callable[[float], float] = float) -> Measured | None:
    """Return row minus reference over their common seeds; without any, of the means, with a count of 0.

    scale: applied to each number first, such as math.log for the log of their ratio.
    """
    ours, theirs = by_seed(row, column), by_seed(reference, column)
    paired = [scale(ours[seed]) - scale(theirs[seed]) for seed in ours if seed in theirs]
    if paired or not ours or not theirs:
        return over_seeds(paired)
    return Measured(scale(mean(ours.values())) - scale(mean(theirs.values())), None, 0)


def over_seeds(values: Sequence[float]) -> Measured | None:
    """Return the mean and deviation of the numbers of some seeds, or None without any."""
    if not values:
        return None
    return Measured(mean(values), stdev(values) if len(values) > 1 else None, len(values))


def paper(row: Row, name: str) -> float | None:
    """Return the paper's number in a column, or None where it prints none."""
    value = row.paper.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def paper_difference(row: Row, reference: Row, name: str) -> float | None:
    """Return the paper's difference between two rows, or None where it does not print both."""
    one, other = paper(row, name), paper(reference, name)
    return None if one is None or other is None else one - other
