"""Differences between runs of the study, with their intervals, and the cells that show them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from depthlm.report.rows import Measured, Row, by_seed, difference, measure_column, over_seeds, pool_deviations
from depthlm.report.sweep import Sweep
from depthlm.report.tables import DASH, Cell, number_text, signed_text

# a seed, or more
Key = TypeVar("Key")


def values_of(sweep: Sweep, key: str) -> list[str]:
    """Return the values of a setting, in the order of the rows."""
    return list(dict.fromkeys(row.settings[key] for row in sweep.rows))


def row_of(sweep: Sweep, **settings: str) -> Row:
    """Return the row with these settings; `__` in a name stands for a dot."""
    wanted = {name.replace("__", "."): value for name, value in settings.items()}
    return next(row for row in sweep.rows if wanted.items() <= row.settings.items())


@dataclass(frozen=True)
class Difference:
    """A difference of losses with its 95% interval, over `count` seeds. strict: whether a wider interval excludes 0."""

    mean: float
    low: float
    high: float
    count: int
    strict: bool

    @property
    def arms(self) -> list[list[float]]:
        """The lengths of its error bar below and above the mean, as matplotlib takes them."""
        return [[self.mean - self.low], [self.high - self.mean]]


def corrected(comparisons: int) -> float:
    """Return the level of an interval with Bonferroni's correction for the comparisons of its table."""
    return 1 - 0.05 / comparisons


def relative_differences(
    sweep: Sweep, pairs: Sequence[tuple[Row, Row]], level: float
) -> tuple[list[Difference | None], Difference | None]:
    """Return the difference of each pair of rows, in nats per token, and the mean over all their runs, in percent.

    The deviation of the log ratios is pooled over the pairs. level: of the wider interval. The laws and the factors use
    the same log ratios.
    """
    column = sweep.first[1]
    log_ratios = [difference(row, reference, column, math.log) for row, reference in pairs]
    # without a common seed, there is nothing to pair
    log_ratios = pool_deviations([number if number is not None and number.count else None for number in log_ratios])
    bases = [measure_column(reference, column) for _, reference in pairs]
    each = [
        None if base is None else with_interval(number, level, lambda log, loss=base.mean: loss * math.expm1(log))
        for number, base in zip(log_ratios, bases, strict=True)
    ]
    known = [number for number in log_ratios if number is not None]
    if not known:
        return each, None
    seeds = sum(number.count for number in known)
    mean = sum(number.count * number.mean for number in known) / seeds
    return each, with_interval(replace(known[0], mean=mean, count=seeds), level, lambda log: 100 * math.expm1(log))


def minus(values: Mapping[Key, float], reference: Mapping[Key, float]) -> dict[Key, float]:
    """Return the differences of the numbers that both have, such as those of seeds."""
    return {key: values[key] - reference[key] for key in values if key in reference}


def paired_difference(differences: Mapping[str, float], level: float) -> Difference | None:
    """Return the mean of differences by seed, with their deviation; None without two seeds."""
    return with_interval(over_seeds(list(differences.values())), level, float)


def gaps_to_vanilla(sweep: Sweep, key: str, value: str) -> dict[str, dict[str, float]]:
    """Return vanilla's losses at one value of a setting, and by how much the other models' exceed them, by seed."""
    losses = {row.settings["model"]: by_seed(row, sweep.first[1]) for row in sweep.rows if row.settings[key] == value}
    vanilla = losses.pop("vanilla")
    return {"vanilla": vanilla} | {model: minus(by_model, vanilla) for model, by_model in losses.items()}


def with_interval(number: Measured | None, level: float, nats: Callable[[float], float]) -> Difference | None:
    """Return a number with its intervals; None without a deviation. nats: turns it into a difference of losses."""
    if number is None or (half := number.interval) is None or (wide := number.half_width(level)) is None:
        return None
    ends = nats(number.mean - half), nats(number.mean + half)
    return Difference(nats(number.mean), *ends, number.count, abs(number.mean) > wide)


def with_deviation(number: Measured | None, digits: int = 3, text: Callable[[float, int], str] = number_text) -> str:
    """Return a mean over seeds with its sample standard deviation. text: of the mean."""
    if number is None:
        return DASH
    deviation = "" if number.deviation is None else f" ± {number_text(number.deviation, digits)}"
    return f"{text(number.mean, digits)}{deviation}"


def difference_cell(number: Difference | None, planned: int, digits: int = 3) -> Cell:
    if number is None:
        return Cell(DASH)
    partly = f" ({number.count} of {planned} seeds)" if number.count < planned else ""
    ends = f"[{signed_text(number.low, digits)}, {signed_text(number.high, digits)}]"
    return Cell(f"{signed_text(number.mean, digits)} {ends}{partly}", number.strict)
