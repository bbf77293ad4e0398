"""The best value of a setting for each group of points, as the runs of a sweep choose it.

Points that differ in nothing but the setting `experiment.best_over` and the seed are a group, and the values of this
setting its grid. Runs with the seeds of `experiment.selection_seeds` choose the value with the lowest mean of
the experiment's first column. While it lies at the edge of the grid, the grid widens. The seeds of the points then
report the chosen value.

What is known follows from the points and from what training itself recorded in their run directories, so a sweep that
was interrupted makes the same choice, and so does one whose runs were evaluated since. Damaged results choose nothing.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple, TypeVar

from depthlm.config.compose import compose
from depthlm.config.experiment import VALIDATION_LOSS, Column, Experiment
from depthlm.config.keys import declaration, keys
from depthlm.config.names import by_name, normal_value, setting_text
from depthlm.config.saved import fixed_changes, load_config
from depthlm.counts import Count, as_number, format_count
from depthlm.errors import ConfigError, UserError, nearest
from depthlm.runs.checkpoints import has_checkpoint
from depthlm.runs.records import COMPLETE, RunRecord, differing_texts, read_run
from depthlm.sweeps.point import Point

Read = Callable[[str], RunRecord]
# the value of best_over in a point, as `normal_value` spells it; None where the point has none
Value = str | None
# a Value, or a value that every point has
Text = TypeVar("Text", str, str | None)


class Undecided(NamedTuple):
    """A group without a chosen value: its label, its runs that choose, and how many of these are done.

    reasons: what is wrong with their results.
    """

    label: str
    runs: int
    done: int
    reasons: tuple[str, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether a choice still waits for runs."""
        return self.done < self.runs


def with_choice(points: Sequence[Point], experiment: Experiment, read: Read) -> list[Point]:
    """Return the points that choose, as far as they are known, then those that report a chosen value.

    points: every value of the grids with every seed that reports. read: returns the record of a run directory.
    Groups with a single value have nothing to choose.

    Raises ConfigError for mistakes in `experiment.best_over` and `experiment.selection_seeds`.
    """
    groups: dict[frozenset[tuple[str, str]], list[Point]] = {}
    for point in points:
        point = replace(point, best_over=experiment.best_over or "")
        groups.setdefault(group_of(point), []).append(point)
    if errors := _mistakes(list(groups.values()), experiment):
        raise ConfigError(errors)
    read = functools.cache(read)
    chosen = [_of_group(members, experiment, read) for members in groups.values()]
    return [*itertools.chain(*(choosing for choosing, _ in chosen)), *itertools.chain(*(rest for _, rest in chosen))]


def group_of(point: Point) -> frozenset[tuple[str, str]]:
    """Return the settings that the points of a group share: those without the seed and best_over."""
    return frozenset((name, value) for name, value in point.settings.items() if name not in ("seed", point.best_over))


def value_of(point: Point) -> Value:
    """Return the value of best_over in a point."""
    given = point.settings.get(point.best_over)
    return None if given is None else normal_value(point.best_over, given)


def has_result(point: Point, run: RunRecord) -> bool:
    """Return whether a run is done: it is complete, or it diverged, which decides against its value.

    One whose results are damaged is not: nothing is known of its value.
    """
    return run.damage is None and (run.state == COMPLETE or (point.selects and run.diverged))


def is_done(point: Point) -> bool:
    """Return whether a point has its result, with its settings and the code of today, and is not to be trained again.

    The check of its start reports what is damaged.
    """
    with suppress(UserError):
        config, run = point.config_elsewhere(), read_run(point.directory)
        if config.resume == "retrain" and not has_checkpoint(run.directory, run.step or 0):
            return False
        return has_result(point, run) and not fixed_changes(load_config(run.directory), config)
    return False


def as_trained(run: RunRecord) -> RunRecord:
    """Return a run without the results of `evaluate`: a choice must not depend on which runs were evaluated."""
    return replace(run, evaluation={})


def selection_column(experiment: Experiment, runs: Iterable[RunRecord]) -> Column:
    """Return the column by which these runs choose: the first, or the validation loss if none of them has the first.

    runs: as trained.
    """
    first = next(iter(experiment.columns.values()), VALIDATION_LOSS)
    return first if any(run.number(first.metric, first.at) is not None for run in runs) else VALIDATION_LOSS


def sort_values(values: Iterable[Text]) -> list[Text]:
    """Return the distinct values, ascending if all are numbers, else in their order."""
    distinct = list(dict.fromkeys(values))
    numbers = {text: as_number(text or "") for text in distinct}
    if None in numbers.values():
        return distinct
    return sorted(distinct, key=lambda text: numbers[text] or 0.0)


def find_undecided(points: Sequence[Point], read: Read = read_run) -> list[Undecided]:
    """Return the groups of a sweep's points that have not chosen a value."""
    groups: dict[frozenset[tuple[str, str]], list[Point]] = {}
    for point in points:
        if point.best_over:
            groups.setdefault(group_of(point), []).append(point)
    undecided = []
    for members in groups.values():
        if not all(point.selects for point in members):
            continue
        runs = [read(point.directory) for point in members]
        reasons = [run.damage for run in runs if run.damage is not None]
        reasons += [f"validation set {name} is not the same in all of them" for name in _unlike_sets(runs)]
        label = ", ".join(report_parts(members[0]).values())
        undecided.append(Undecided(label, len(members), sum(map(has_result, members, runs)), tuple(reasons)))
    return undecided


def undecided_text(groups: Sequence[Undecided]) -> str:
    """Return the groups without a chosen value as a sentence."""
    texts = []
    for group in groups:
        done = (
            f"{group.done} of {format_count(group.runs, 'run')} done"
            if group.waits
            else format_count(group.runs, "run")
        )
        reasons = group.reasons or (() if group.waits else ("but no finite number to choose by",))
        texts.append(f"{group.label} ({', '.join([done, *reasons])})")
    return f"{format_count(len(groups), 'group')} without a chosen value yet: {', '.join(texts)}"


def report_parts(point: Point) -> dict[str, str]:
    """Return the parts of the label of a point's group, which does not have the values of the grid."""
    parts = {name: text for name, text in point.parts.items() if name != point.best_over}
    return parts or {"model": point.mechanism}


def _of_group(members: Sequence[Point], experiment: Experiment, read: Read) -> tuple[list[Point], list[Point]]:
    """Return the points of a group that choose, and those that report the chosen value if it is known."""
    grid: dict[Value, Point] = {}
    for point in members:
        grid.setdefault(value_of(point), point)
    if len(grid) < 2:
        return [], [replace(point, parts=report_parts(point)) for point in members]
    choosing: dict[Value, list[Point]] = {}
    initial, wider = len(grid), grid
    while wider:
        for value, point in wider.items():
            choosing[value] = [_make_selecting(point, str(seed)) for seed in dict.fromkeys(experiment.selection_seeds)]
        means = _means(choosing, experiment, read)
        best = min(sort_values(means), key=means.__getitem__, default=None)
        wider = _wider(grid, means, best) if means and len(grid) - initial < experiment.widen else {}
        grid |= wider
    # in ascending order, however the grid grew
    selection = [point for value in sort_values(grid) for point in choosing[value]]
    if not means or not math.isfinite(means[best]):
        return selection, []
    reported = {point.seed: point for point in members if value_of(point) == best}
    points = [
        reported.get(seed) or _change_settings(grid[best], {} if seed is None else {"seed": seed})
        for seed in dict.fromkeys(point.seed for point in members)
    ]
    return selection, [replace(point, parts=report_parts(point)) for point in points]


def _means(choosing: Mapping[Value, Sequence[Point]], experiment: Experiment, read: Read) -> dict[Value, float]:
    """Return the mean over the seeds of each value, where lower is better; {} while a run has no number."""
    runs = {
        value: [(point, as_trained(read(point.directory))) for point in points] for value, points in choosing.items()
    }
    every_run = list(itertools.chain(*runs.values()))
    if not all(itertools.starmap(has_result, every_run)) or _unlike_sets([run for _, run in every_run]):
        return {}
    column = selection_column(experiment, (run for _, run in every_run))
    means = {value: fmean(_score(run, column) for _, run in of_value) for value, of_value in runs.items()}
    return {} if any(map(math.isnan, means.values())) else means


def _score(run: RunRecord, column: Column) -> float:
    """Return the number of a run that is done, where lower is better: infinity if it is not finite, nan without any."""
    result = math.inf if run.diverged else run.result(column.metric, column.at)
    if result is None:
        return math.nan
    return result if column.better == "lower" or math.isinf(result) else -result


def _unlike_sets(runs: Sequence[RunRecord]) -> list[str]:
    return differing_texts([as_trained(run) for run in runs], every_set=True)


def _wider(grid: Mapping[Value, Point], means: Mapping[Value, float], best: Value) -> dict[Value, Point]:
    """Return the value that the grid gains because the best one is at its edge, with a point that has it; else {}.

    It continues the ratio of the two outermost values, rounded to three significant digits, or to a whole number
    where the values are whole. If these have equal means, the setting has no effect, and the grid gains nothing.
    """
    texts, name = sort_values(grid), grid[best].best_over
    edge = texts[:2] if best == texts[0] else texts[:-3:-1] if best == texts[-1] else []
    numbers = [number for text in edge if (number := as_number(text or "")) and 0 < number < math.inf]
    if len(numbers) < 2 or (math.isfinite(means[best]) and means.get(edge[1]) == means[best]):
        return {}
    product, key = numbers[0] * numbers[0] / numbers[1], declaration(name)
    whole = key.plain_type in (int, Count) if key is not None else all(map(float.is_integer, map(float, numbers)))
    beyond = normal_value(name, str(round(product)) if whole or product.is_integer() else f"{product:.3g}")
    if beyond not in (*texts, "0"):
        # a value that the configuration refuses is not added
        with suppress(ConfigError):
            point = _change_settings(grid[best], {name: beyond})
            compose(point.overrides, point.config_dir, here=False)
            return {beyond: point}
    return {}


def _make_selecting(point: Point, seed: str) -> Point:
    """Return the point that helps to choose with a seed; its label has the value of the grid."""
    point, name = _change_settings(point, {"seed": seed}), point.best_over
    # a group has at least this part of a label
    parts = point.parts if point.parts.keys() - {name} else {"model": point.mechanism}
    if name in point.settings:
        parts = parts | {name: point.parts.get(name) or setting_text(name, point.settings[name])}
    return replace(point, parts=parts, selects=True)


def _change_settings(point: Point, values: dict[str, str]) -> Point:
    """Return a point with other values of settings, in its overrides and its label."""
    texts = [
        f"{text.partition('=')[0]}={values[name]}" if (name := next(iter(by_name([text])))) in values else text
        for text in point.overrides
    ]
    texts += [f"{name}={value}" for name, value in values.items() if name not in by_name(point.overrides)]
    parts = {
        name: text
        if name not in values
        # an experiment's label has the bare value
        else values[name]
        if text == point.settings[name]
        else setting_text(name, values[name])
        for name, text in point.parts.items()
    }
    return replace(point, overrides=texts, settings=point.settings | values, parts=parts)


def _mistakes(groups: Sequence[Sequence[Point]], experiment: Experiment) -> list[str]:
    """Return the mistakes in the keys of a choice."""
    name = experiment.best_over or ""
    given, errors = f"experiment.best_over={name}", []
    points = [point for members in groups for point in members]
    varies = any(len({*map(value_of, members)}) > 1 for members in groups)
    is_set = any(name in point.settings for point in points)
    # one point of an experiment has a single value of its grid
    if name == "seed" or not (varies or (is_set and experiment.name)):
        known = keys().keys() | {other for point in points for other in point.settings}
        hint = nearest(name, known) if name not in known else f"; give several values, as in {name}=1,2"
        errors.append(f"{given}: no points differ in {name}{hint}")
    if not experiment.selection_seeds:
        errors.append(
            f"{given}: needs experiment.selection_seeds, the seeds of the runs that choose, as in "
            "experiment.selection_seeds=[11]"
        )
    if any(None in values and len(values) > 1 for values in ({*map(value_of, members)} for members in groups)):
        errors.append(f"{given}: some points do not set it; write its value in each of them")
    several = [point for members in groups if len({*map(value_of, members)}) > 1 for point in members]
    reporting = {point.seed or point.default_seed for point in several}
    for seed in sorted({*map(str, experiment.selection_seeds)} & reporting):
        errors.append(
            f"experiment.selection_seeds: {seed} is also a seed that reports; runs that choose need others, as in "
            "experiment.selection_seeds=[101,102]"
        )
    if any(point.follows for point in points):
        errors.append(f"{given}: not with points that start from another point, as in init_from=@label")
    return errors
