"""Differences between runs of the studies, with their intervals, and the cells that show them."""

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
    """Return the row with these settings."""
    return next(row for row in sweep.rows if settings.items() <= row.settings.items())


@dataclass(frozen=True)
class Difference:
    """A difference of losses with its 95% interval. strict: whether a wider interval excludes 0."""

    mean: float
    low: float
    high: float
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
) -> tuple[list[Difference], Difference]:
    """Return the difference of each pair of rows, in nats per token, and the mean over all their runs, in percent.

    The deviation of the log ratios is pooled over the pairs. level: of the wider interval. The laws and the factors use
    the same log ratios.
    """
    column = sweep.first[1]
    log_ratios = pool_deviations([difference(row, reference, column, math.log) for row, reference in pairs])
    losses = [measure_column(reference, column).mean for _, reference in pairs]
    luck = [math.hypot(*(sweep.luck[row.label] / measure_column(row, column).mean for row in pair)) for pair in pairs]
    log_ratios = [replace(number, luck=chance) for number, chance in zip(log_ratios, luck, strict=True)]
    each = [
        with_interval(number, level, lambda log, loss=loss: loss * math.expm1(log))
        for number, loss in zip(log_ratios, losses, strict=True)
    ]
    seeds = sum(number.count for number in log_ratios)
    mean = sum(number.count * number.mean for number in log_ratios) / seeds
    chance = math.hypot(*(number.count * number.luck for number in log_ratios)) / seeds
    overall = replace(log_ratios[0], mean=mean, count=seeds, luck=chance)
    return each, with_interval(overall, level, lambda log: 100 * math.expm1(log))


def minus(values: Mapping[Key, float], reference: Mapping[Key, float]) -> dict[Key, float]:
    """Return the differences of the numbers that both have, such as those of seeds."""
    return {key: values[key] - reference[key] for key in values if key in reference}


def gaps_to_vanilla(sweep: Sweep, size: str) -> dict[str, dict[str, float]]:
    """Return by how much the losses of the other models exceed vanilla's at a size, by model and seed."""
    losses = {row.settings["model"]: by_seed(row, sweep.first[1]) for row in sweep.rows if row.settings["size"] == size}
    vanilla = losses.pop("vanilla")
    return {model: minus(by_model, vanilla) for model, by_model in losses.items()}


def with_interval(number: Measured, level: float = 0.95, nats: Callable[[float], float] = float) -> Difference:
    """Return a number with its intervals. nats: turns it into a difference of losses."""
    half, wide = number.half_width(0.95), number.half_width(level)
    ends = nats(number.mean - half), nats(number.mean + half)
    return Difference(nats(number.mean), *ends, abs(number.mean) > wide)


def with_deviation(values: Sequence[float], digits: int = 3, text: Callable[[float, int], str] = number_text) -> str:
    """Return a mean over seeds with its sample standard deviation, a dash without any. text: of the mean."""
    number = over_seeds(values)
    return DASH if number is None else f"{text(number.mean, digits)} ± {number_text(number.deviation, digits)}"


def difference_cell(number: Difference | None, digits: int = 3) -> Cell:
    """Return the cell of a difference with its 95% interval, bold if the wider one excludes 0."""
    if number is None:
        return Cell(DASH)
    ends = f"[{signed_text(number.low, digits)}, {signed_text(number.high, digits)}]"
    return Cell(f"{signed_text(number.mean, digits)} {ends}", number.strict)
