"""The study of CompleteP: which share of a mechanism's gain is left when both models have a parametrization for depth.

docs/results/question_completep.md defines the differences, their intervals and what they answer.
"""

import itertools
import math
from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np
from scipy.optimize import brentq

from depthlm.report.rows import Measured, by_seed, luck_of, normal_quantile, over_seeds, student_t
from depthlm.report.sweep import Sweep
from depthlm.report.tables import DASH, Cell, Table, cells, number_text
from docs.results.analysis.depth import LARGEST_DEVIATION
from docs.results.analysis.differences import difference_cell, with_deviation, with_interval

LABELS, LAYERS = ("standard", "CompleteP"), (12, 24)
MECHANISMS = ("attention_residuals", "value_residual", "dca", "mhc_hunyuan_v4")
SEEDS = tuple(str(seed) for seed in range(1, 7))
# vanilla's seeds that stand for a mechanism, by the seed with which each is paired
CONTROL = {str(seed): str(seed + 6) for seed in range(1, 7)}
# a mechanism, a parametrization and a number of layers
Place = tuple[str, str, int]


@dataclass(frozen=True)
class Arm:
    """A mechanism's differences from vanilla by parametrization and seed, means over the depths. luck: of each."""

    gaps: Mapping[str, Sequence[float]]
    luck: Mapping[str, float]

    def gap(self, label: str) -> Measured:
        """Return the difference with a parametrization."""
        gaps = self.gaps[label]
        return Measured(fmean(gaps), float(np.std(gaps, ddof=1)), len(gaps), luck=self.luck[label])

    @property
    def interaction(self) -> Measured:
        """I: the difference with CompleteP minus that with the standard parametrization."""
        change = np.subtract(self.gaps["CompleteP"], self.gaps["standard"])
        luck = math.hypot(*self.luck.values())
        return Measured(float(change.mean()), float(change.std(ddof=1)), len(change), luck=luck)

    @property
    def share(self) -> tuple[float, float, float] | None:
        """R with Fieller's interval for paired numbers; None without a gain in the standard parametrization.

        The interval is where the mean of CompleteP's difference minus R times the standard one may be 0.
        """
        both = np.array([self.gaps["CompleteP"], self.gaps["standard"]])
        means, seeds = both.mean(1), both.shape[1]
        spread = student_t(seeds - 1) ** 2 * np.cov(both) / seeds
        spread += np.diag([(normal_quantile(0.95) * self.luck[label]) ** 2 for label in ("CompleteP", "standard")])
        (c, b), (_, a) = np.outer(means, means) - spread
        if means[1] >= 0 or a <= 0:
            return None
        half = math.sqrt(max(b * b - a * c, 0.0)) / a
        return float(means[0] / means[1]), float(b / a - half), float(b / a + half)


@dataclass(frozen=True)
class Study:
    """The cells of the study whose runs are complete: losses by seed, luck of the choice and rate.

    diverged: those with a run that diverged, which have no mean.
    """

    losses: Mapping[Place, Mapping[str, float]]
    luck: Mapping[Place, float]
    rates: Mapping[Place, str]
    diverged: Collection[Place] = ()

    def arm(self, model: str, label: str, layers: Sequence[int]) -> tuple[list[float], float] | None:
        """Return the gaps of a mechanism, or of the control, by seed, with their luck; None while runs are missing."""
        control = model == "control"
        pairs = [(("vanilla" if control else model, label, n), ("vanilla", label, n)) for n in layers]
        if not all(place in self.losses for pair in pairs for place in pair):
            return None
        gaps = [
            fmean(self.losses[own][CONTROL[seed] if control else seed] - self.losses[base][seed] for own, base in pairs)
            for seed in SEEDS
        ]
        # the control has vanilla's rates
        luck = 0.0 if control else math.hypot(*(self.luck[place] for pair in pairs for place in pair)) / len(pairs)
        return gaps, luck

    def compare(self, model: str, layers: Sequence[int] = LAYERS) -> Arm | None:
        """Return the differences of a mechanism, or of the control; None while runs are missing."""
        known = {label: found for label in LABELS if (found := self.arm(model, label, layers)) is not None}
        if len(known) < len(LABELS):
            return None
        gaps, luck = ({label: found[part] for label, found in known.items()} for part in (0, 1))
        return Arm(gaps, luck)

    def stable_layers(self, model: str) -> list[int]:
        """Return the numbers of layers at which the seeds of a mechanism and of vanilla do not differ much."""
        places = {n: [(name, label, n) for name in ("vanilla", model) for label in LABELS] for n in LAYERS}
        return [n for n in LAYERS if all(stdev(self.losses[p].values()) <= LARGEST_DEVIATION for p in places[n])]


def study_of(sweep: Sweep) -> Study:
    """Return the cells of the sweep whose runs are complete."""
    losses, luck, rates, diverged = {}, {}, {}, []
    # the question takes the deviation over seeds, and not that of a mean over the two that choose
    of_rows = ChainMap(*(luck_of(each.rows, sweep.selection, sweep.first[1], seeds=1) for each in sweep.series))
    for row in sweep.rows:
        label = "standard" if row.settings["parametrization"] == "standard" else "CompleteP"
        place = row.settings["model"], label, int(row.settings["size.num_layers"])
        known = by_seed(row, sweep.first[1])
        if any(run.diverged for run in row.runs):
            diverged.append(place)
        elif len(known) == len(row.runs):
            losses[place], luck[place] = known, of_rows[row.label]
            rates[place] = row.settings["optimizer.lr"]
    return Study(losses, luck, rates, diverged)


def chance_of(number: Measured) -> float:
    """Return the p-value of a number: the level of its widest interval without 0 is one minus it."""
    ends = 1e-9, 1 - 1e-12
    low, high = (abs(number.mean) - (number.half_width(level) or 0.0) for level in ends)
    if low <= 0 or high >= 0:
        return 1.0 if low <= 0 else 0.0
    return 1 - brentq(lambda level: (number.half_width(level) or 0.0) - abs(number.mean), *ends)


def holm(chances: Mapping[str, float]) -> set[str]:
    """Return the comparisons whose difference is shown by Holm's procedure at a level of 0.05."""
    shown = set()
    for rank, name in enumerate(sorted(chances, key=lambda name: chances[name])):
        if chances[name] > 0.05 / (len(chances) - rank):
            break
        shown.add(name)
    return shown


def answer(arm: Arm, shown: bool) -> str:
    """Return the answer for a mechanism. shown: its interaction, after Holm's correction."""
    if (share := arm.share) is not None:
        _, low, high = share
        return "repair" if high < 0.5 else "synergy" if low > 1 else "additive" if low > 0.5 else "not shown"
    direction = "larger" if arm.interaction.mean > 0 else "smaller"
    return f"CompleteP makes the difference {direction}" if shown else "not shown"


def results(study: Study) -> Table:
    """Return the answer for each mechanism, dashes where runs are missing; bold: also after Holm's correction.

    Where the seeds of a depth differ much, a second line is without it.
    """
    arms = {name: study.compare(name) for name in (*MECHANISMS, "control")}
    control = arms["control"]
    holds = control is not None and abs(control.interaction.mean) <= (control.interaction.interval or 0.0)
    shown = _find_shown(arms, holds)
    table = [_line(name, arm, holds, shown) for name, arm in arms.items()]
    for name in MECHANISMS:
        if arms[name] is not None and len(layers := study.stable_layers(name)) == 1:
            others = arms | {name: study.compare(name, layers)}
            table.append(_line(name, others[name], holds, _find_shown(others, holds), f", {layers[0]} layers alone"))
    return Table(["minus vanilla, mean of the depths", *LABELS, "I", "R", "answer"], table)


def _find_shown(arms: Mapping[str, Arm | None], holds: bool) -> set[str]:
    """Return the mechanisms whose interaction is shown; one whose runs are missing counts as a comparison."""
    chances = {name: 1.0 if (arm := arms[name]) is None else chance_of(arm.interaction) for name in MECHANISMS}
    return holm(chances) if holds else set()


def _line(name: str, arm: Arm | None, holds: bool, shown: set[str], note: str = "") -> list[Cell]:
    if arm is None:
        return cells([name, *[DASH] * 5])
    numbers = [with_interval(number) for number in (*map(arm.gap, LABELS), arm.interaction)]
    numbers = [replace(number, strict=place == 2 and name in shown) for place, number in enumerate(numbers)]
    share, said = DASH, ""
    if name != "control":
        share = DASH if arm.share is None else "{} [{}, {}]".format(*(number_text(end, 2) for end in arm.share))
        said = answer(arm, name in shown) if holds else "none: the control differs"
    return [Cell(f"{name}{note}"), *map(difference_cell, numbers), *cells([share, said])]


def places(study: Study) -> Table:
    """Return the chosen rate, the loss and the difference of each mechanism, parametrization and depth.

    Bold: the interval of the difference excludes 0.
    """
    table = []
    for model in ("vanilla", *MECHANISMS):
        line = [Cell(model)]
        for place in itertools.product([model], LABELS, LAYERS):
            if place not in study.losses:
                line.append(Cell("diverged" if place in study.diverged else DASH))
                continue
            text = f"{float(study.rates[place]):g}, {with_deviation([*study.losses[place].values()])}"
            gap = None if model == "vanilla" else study.arm(*place[:2], [place[2]])
            if gap is None:
                line.append(Cell(text))
                continue
            shown = difference_cell(with_interval(replace(over_seeds(gap[0]), luck=gap[1])))
            line.append(Cell(f"{text}, {shown.text}", shown.bold))
        table.append(line)
    head = [f"{label}, {layers} layers" for label, layers in itertools.product(LABELS, LAYERS)]
    return Table(["rate, loss, minus vanilla", *head], table)
