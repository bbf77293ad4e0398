"""The study of CompleteP: which share of a mechanism's gain is left when both models have a parametrization for depth.

docs/results/question_completep.md defines the differences, their intervals and what they answer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from scipy.optimize import brentq

from depthlm.report.rows import Measured, by_seed, normal_quantile, student_t
from depthlm.report.sweep import Sweep
from depthlm.report.tables import DASH, Cell, Table, cells, number_text
from docs.results.analysis.differences import difference_cell, with_deviation, with_interval

LABELS, LAYERS = ("standard", "CompleteP"), (12, 24)
MECHANISMS = ("attention_residuals", "value_residual", "attention_residuals_inkling2", "mhc_hunyuan_v4")
SEEDS = [str(seed) for seed in range(1, 7)]
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
    """The reported losses by seed, the luck and the chosen rate of each place whose runs are complete."""

    losses: Mapping[Place, Mapping[str, float]]
    luck: Mapping[Place, float]
    rates: Mapping[Place, str]

    def arm(self, model: str, label: str) -> tuple[list[float], float] | None:
        """Return the gaps of a mechanism, or of the control, by seed, with their luck; None while runs are missing."""
        control = model == "control"
        pairs = [(("vanilla" if control else model, label, n), ("vanilla", label, n)) for n in LAYERS]
        if not all(place in self.losses for pair in pairs for place in pair):
            return None
        gaps = [
            fmean(self.losses[own][CONTROL[seed] if control else seed] - self.losses[base][seed] for own, base in pairs)
            for seed in SEEDS
        ]
        # the control has vanilla's rates
        luck = 0.0 if control else math.hypot(*(self.luck[place] for pair in pairs for place in pair)) / len(pairs)
        return gaps, luck

    def compare(self, model: str) -> Arm | None:
        """Return the differences of a mechanism, or of the control; None while runs are missing."""
        known = {label: found for label in LABELS if (found := self.arm(model, label)) is not None}
        if len(known) < len(LABELS):
            return None
        return Arm(
            {label: gaps for label, (gaps, _) in known.items()}, {label: luck for label, (_, luck) in known.items()}
        )


def study_of(sweep: Sweep) -> Study:
    """Return the complete places of the sweep."""
    losses, luck, rates = {}, {}, {}
    for row in sweep.rows:
        place = row.settings["model"], row.parts["label"], int(row.settings["size.num_layers"])
        known = by_seed(row, sweep.first[1])
        if len(known) == len(row.runs):
            losses[place], luck[place] = known, sweep.luck[row.label]
            rates[place] = row.settings["optimizer.lr"]
    return Study(losses, luck, rates)


def chance_of(number: Measured) -> float:
    """Return the p-value of a number: the level of its widest interval without 0 is one minus it."""
    if abs(number.mean) <= (number.half_width(1e-9) or 0.0):
        return 1.0
    return 1 - brentq(lambda level: (number.half_width(level) or 0.0) - abs(number.mean), 1e-9, 1 - 1e-12)


def holm(chances: Mapping[str, float], level: float = 0.05) -> set[str]:
    """Return the comparisons whose difference is shown by Holm's procedure."""
    shown = set()
    for rank, name in enumerate(sorted(chances, key=lambda name: chances[name])):
        if chances[name] > level / (len(chances) - rank):
            break
        shown.add(name)
    return shown


def answer(arm: Arm, shown: bool, control_holds: bool) -> str:
    """Return what a mechanism's numbers answer. shown: its I is. control_holds: the control's may be 0."""
    if not control_holds:
        return "no answer: the control differs"
    if (share := arm.share) is not None:
        _, low, high = share
        return "repair" if high < 0.5 else "synergy" if low > 1 else "additive" if low > 0.5 else "not shown"
    return "not shown" if not shown else f"CompleteP makes it {'larger' if arm.interaction.mean > 0 else 'smaller'}"


def results(study: Study) -> Table:
    """Return the answer for each mechanism, dashes where runs are missing; bold: also after Holm's correction."""
    arms = {name: study.compare(name) for name in (*MECHANISMS, "control")}
    chances = {name: chance_of(arm.interaction) for name, arm in arms.items() if arm is not None and name != "control"}
    # a mechanism whose runs are missing counts as a comparison
    shown = holm(dict.fromkeys(MECHANISMS, 1.0) | chances)
    control = arms["control"]
    holds = control is not None and abs(control.interaction.mean) <= (control.interaction.interval or 0.0)
    table = []
    for name, arm in arms.items():
        if arm is None:
            table.append(cells([name, *[DASH] * 5]))
            continue
        gaps = [Cell(difference_cell(with_interval(arm.gap(label))).text) for label in LABELS]
        interaction = Cell(difference_cell(with_interval(arm.interaction)).text, name in shown)
        share, said = DASH, "" if name == "control" else answer(arm, name in shown, holds)
        if name != "control" and arm.share is not None:
            share = "{} [{}, {}]".format(*(number_text(value, 2) for value in arm.share))
        table.append([Cell(name), *gaps, interaction, Cell(share), Cell(said)])
    return Table(["minus vanilla, mean of the depths", *LABELS, "change", "share left", "answer"], table)


def places(study: Study) -> Table:
    """Return the chosen rate and the loss of each mechanism, parametrization and depth."""
    table = []
    for model in ("vanilla", *MECHANISMS):
        keys = [(model, label, layers) for label in LABELS for layers in LAYERS]
        texts = [
            f"{float(study.rates[key]):g}, {with_deviation([*study.losses[key].values()])}"
            if key in study.losses
            else DASH
            for key in keys
        ]
        table.append(cells([model, *texts]))
    head = [f"{label}, {layers} layers" for label in LABELS for layers in LAYERS]
    return Table(["rate, and the loss over the seeds", *head], table)
