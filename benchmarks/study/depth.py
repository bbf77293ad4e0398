"""The study of depth: differences from vanilla over the number of layers, and their slopes.

docs/results/question.md defines the groups, the slopes and what they answer.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from benchmarks.study.differences import (
    Difference,
    corrected,
    difference_cell,
    minus,
    with_deviation,
    with_interval,
)
from depthlm.report.choice import Group, groups_of
from depthlm.report.rows import Measured, by_seed, measure_column, over_seeds, pool_deviations, student_t
from depthlm.report.sweep import Sweep
from depthlm.report.tables import DASH, Cell, Table, cells, number_text
from depthlm.runs.records import FAILED

STATIC = ("embedding_skip", "unet_skip", "value_residual", "uniform_mix", "denseformer")
LEARNED = (
    "attention_residuals",
    "attention_residuals_inkling2",
    "depth_attention",
    "moda",
    "dca",
    "mhc",
    "mhc_hunyuan_v4",
    "mudd",
)
GROUPS = {"learned": LEARNED, "static": STATIC}
# the mechanisms of this study with which the paper of Depth-Attention compares it
RIVALS = ("uniform_mix", "denseformer", "attention_residuals", "mhc")
SEEDS = 3
# vanilla with a wider MLP
WIDER = ("vanilla, wider", "vanilla, widest")
EQUAL = " with equal parameters"
# where the losses of seeds differ more, a run may have failed
LARGEST_DEVIATION = 0.1

# differences in nats per token, by the number of layers and the seed
Gaps = Mapping[tuple[int, str], float]
# a mechanism, or a wider vanilla, and its number of layers
Place = tuple[str, int]


@dataclass(frozen=True)
class Study:
    """The reported validation losses, by mechanism, number of layers and seed.

    planned: also the places without runs. parameters: outside the embedding. failed: places of runs that diverged.
    """

    planned: Collection[Place]
    losses: Mapping[Place, Mapping[str, float]]
    parameters: Mapping[Place, int]
    failed: Collection[Place] = ()

    @property
    def layers(self) -> list[int]:
        """The numbers of layers."""
        return sorted({layers for _, layers in self.planned})

    def depths(self, model: str, equal: bool = False, without: Collection[Place] = ()) -> list[int]:
        """Return the numbers of layers at which a mechanism is compared with vanilla, in a complete study."""
        bases = ("vanilla", *WIDER) if equal else ("vanilla",)
        return [n for n in self.layers if not any((name, n) in without for name in (model, *bases))]

    def vanilla_with(self, layers: int, parameters: int) -> dict[str, float]:
        """Return vanilla's loss by seed at a number of parameters, by a power law between the two beside it.

        Empty while one of vanilla's widths has no losses.
        """
        places = [(name, layers) for name in ("vanilla", *WIDER) if (name, layers) in self.planned]
        if not all(place in self.losses for place in places):
            return {}
        points = [(self.parameters[place], self.losses[place]) for place in places]
        upper = next((n for n, (count, _) in enumerate(points) if n and count >= parameters), len(points) - 1)
        (few, small), (many, large) = points[upper - 1], points[upper]
        share = math.log(parameters / few) / math.log(many / few)
        return {seed: small[seed] ** (1 - share) * large[seed] ** share for seed in small if seed in large}

    def gaps(self, model: str, equal: bool = False, without: Collection[Place] = ()) -> Gaps:
        """Return by how much a mechanism's losses exceed vanilla's. equal: those of vanilla with equal parameters."""
        gaps = {}
        for layers in self.depths(model, equal, without):
            losses, base = (self.losses.get((name, layers), {}) for name in (model, "vanilla"))
            if equal and losses:
                base = self.vanilla_with(layers, self.parameters[model, layers])
            gaps |= {(layers, seed): losses[seed] - base[seed] for seed in losses if seed in base}
        return gaps

    def slope(
        self, model: str, equal: bool = False, without: Collection[Place] = (), level: float = 0.95
    ) -> Difference | None:
        """Return the slope of a mechanism's differences from vanilla; None while a depth is missing."""
        return slope(self.gaps(model, equal, without), self.depths(model, equal, without), level)

    def unstable(self) -> tuple[Place, ...]:
        """Return the places where a run diverged, or may have failed, since the seeds differ much."""
        deviating = (
            place for place, by in self.losses.items() if len(by) > 1 and stdev(by.values()) > LARGEST_DEVIATION
        )
        return tuple(dict.fromkeys([*self.failed, *deviating]))

    def failing(self) -> list[str]:
        """Return the mechanisms with such places."""
        places = self.unstable()
        return [model for model in (*STATIC, *LEARNED) if any(name == model for name, _ in places)]


def study_of(sweep: Sweep) -> Study:
    """Return the reported losses of a sweep."""
    planned, losses, parameters, failed = [], {}, {}, []
    for row in [*sweep.selection, *sweep.rows]:
        layers, _, width = row.parts["task"].partition(" layers")
        place = f"{row.settings['model']}{width}", int(layers)
        planned.append(place)
        if row.points[0].selects:
            continue
        failed += [place for run in row.runs if run.state == FAILED][:1]
        if by := by_seed(row, sweep.first[1]):
            losses[place] = by
            size = sweep.configs[sweep.rows.index(row)].size
            total = next(run.summary["parameters"] for run in row.runs if "parameters" in run.summary)
            parameters[place] = total - size.vocab_size * size.hidden_size
    return Study(dict.fromkeys(planned), losses, parameters, failed)


def slope(gaps: Gaps, depths: Sequence[int], level: float = 0.95) -> Difference | None:
    """Return the slope of a least-squares line over the base-2 logarithm of the layers.

    depths: where gaps are needed; None without them, with fewer than two, or with fewer than three gaps. level: of the
    wider interval.
    """
    from scipy.stats import linregress

    if {layers for layers, _ in gaps} != {*depths} or len(depths) < 2 or len(gaps) < 3:
        return None
    line = linregress([math.log2(layers) for layers, _ in gaps], [*gaps.values()])
    half, wide = (student_t(len(gaps) - 2, share) * line.stderr for share in (0.95, level))
    return Difference(line.slope, line.slope - half, line.slope + half, len(gaps), abs(line.slope) > wide)


def groups_without(*models: str) -> dict[str, tuple[str, ...]]:
    """Return the two groups without some mechanisms."""
    return {group: tuple(m for m in members if m not in models) for group, members in GROUPS.items()}


def group_gaps(study: Study, models: Sequence[str], equal: bool = False, without: Collection[Place] = ()) -> Gaps:
    """Return the mean of the gaps of some mechanisms, where all of them have one.

    Where a mechanism is left out, its own line through its other depths stands for it: without it, the level of the
    mechanism would become a slope of the group.
    """
    every = {model: {**study.gaps(model, equal, without)} for model in models}
    depths = study.depths("vanilla", equal, without)
    for model, gaps in every.items():
        if missing := [layers for layers in depths if (model, layers) in without]:
            line = study.slope(model, equal, without)
            if line is None:
                return {}
            centre = fmean(math.log2(layers) for layers, _ in gaps)
            mean = fmean(gaps.values())
            seeds = {seed for _, seed in gaps}
            gaps |= {(n, seed): mean + line.mean * (math.log2(n) - centre) for n in missing for seed in seeds}
    first, *others = every.values()
    return {key: fmean(gaps[key] for gaps in every.values()) for key in first if all(key in gaps for gaps in others)}


def means_of(gaps: Gaps) -> Gaps:
    """Return the mean of the gaps at each depth, as those of one seed."""
    return {(n, ""): fmean(gap for (layers, _), gap in gaps.items() if layers == n) for n, _ in gaps}


def between_mechanisms(first: Sequence[Difference | None], second: Sequence[Difference | None]) -> Difference | None:
    """Return the difference of the mean slopes of two groups, with Welch's interval over their mechanisms."""
    from scipy.stats import ttest_ind

    if None in first or None in second:
        return None
    slopes = [[number.mean for number in numbers if number is not None] for numbers in (first, second)]
    low, high = ttest_ind(*slopes, equal_var=False).confidence_interval(0.95)
    mean = fmean(slopes[0]) - fmean(slopes[1])
    return Difference(mean, float(low), float(high), sum(map(len, slopes)), low > 0 or high < 0)


def over_mechanisms(lines: Sequence[Difference | None]) -> Difference | None:
    """Return the mean slope of a group, with Student's interval over its mechanisms."""
    slopes = [line.mean for line in lines if line is not None]
    return with_interval(over_seeds(slopes), 0.95, float) if len(slopes) == len(lines) else None


def by_depth(study: Study, gaps: Gaps, level: float = 0.95) -> list[Difference | None]:
    """Return the mean of gaps at each depth, with the deviation over seeds pooled over the depths.

    level: of the wider interval.
    """
    return [with_interval(number, level, float) for number in pooled_depths(study, gaps)]


def pooled_depths(study: Study, gaps: Gaps) -> list[Measured | None]:
    """Return the mean of gaps at each depth, with the deviation over seeds pooled over the depths."""
    each_depth = [[gap for (layers, _), gap in gaps.items() if layers == each] for each in study.layers]
    return pool_deviations([over_seeds(values) for values in each_depth])


def over_depths(study: Study, gaps: Gaps, level: float = 0.95) -> Difference | None:
    """Return the mean of gaps over all depths, with the deviation pooled over them; None while a depth is missing.

    level: of the wider interval.
    """
    numbers = pooled_depths(study, gaps)
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        return None
    mean = replace(known[0], mean=fmean(number.mean for number in known), count=len(gaps))
    return with_interval(mean, level, float)


def in_question(study: Study) -> list[str]:
    """Return the mechanisms whose mean difference over the depths may be 0, or whose difference changes its sign."""
    return [model for model in (*STATIC, *LEARNED) if is_in_question(study, study.gaps(model))]


def is_in_question(study: Study, gaps: Gaps) -> bool:
    """Return whether the mean of gaps over the depths may be 0, or the means of depths have both signs."""
    mean = over_depths(study, gaps)
    return mean is not None and (mean.low <= 0 <= mean.high or len({gap > 0 for gap in means_of(gaps).values()}) > 1)


def differences(study: Study, equal: bool = False) -> Table:
    """Return the difference of each mechanism from vanilla at each depth, its mean, and its slope over the depth.

    equal: vanilla with equal parameters.
    """
    gaps = {model: study.gaps(model, equal) for model in (*STATIC, *LEARNED)}
    return _over_depths(study, f"minus vanilla{EQUAL if equal else ''}", gaps)


def rivals(study: Study) -> Table:
    """Return the differences of Depth-Attention from the mechanisms with which its paper compares it."""
    own = study.gaps("depth_attention")
    return _over_depths(study, "depth_attention minus", {model: minus(own, study.gaps(model)) for model in RIVALS})


def _over_depths(study: Study, title: str, gaps: Mapping[str, Gaps]) -> Table:
    """Return each mean of gaps at each depth, over the depths, and its slope.

    Bold: the interval excludes 0 also with the correction for all differences, all means, or all slopes, of the table.
    """
    table, depths = [], study.layers
    level, narrow = corrected(len(gaps)), corrected(len(gaps) * len(depths))
    for label, each in gaps.items():
        shown = [difference_cell(number, SEEDS) for number in by_depth(study, each, narrow)]
        mean = difference_cell(over_depths(study, each, level), SEEDS * len(depths))
        table.append([Cell(label), *shown, mean, slope_cell(slope(each, depths, level))])
    return Table([title, *(f"{layers} layers" for layers in depths), "mean", "slope"], table)


def answers(study: Study) -> Table:
    """Return the slopes of the two groups and of their difference, with 95% intervals.

    They are also given over mechanisms, which takes those of a group as a sample; by the means of the depths alone,
    since the seeds of a depth share the choice of a rate; without
    DenseFormer; without places whose runs may have failed; and without their mechanisms. Bold: the interval excludes 0.
    """
    table, unstable, failing = [], study.unstable(), study.failing()
    failed = ", ".join(f"{name} with {layers} layers" for name, layers in unstable)
    for equal in (False, True):
        label = f"minus vanilla{EQUAL if equal else ''}"
        table.append([Cell(label), *_answer_cells(study, GROUPS, equal)])
        table.append([Cell(f"{label}, over means of depths"), *_answer_cells(study, GROUPS, equal, over_means=True)])
        others = groups_without("denseformer")
        table.append([Cell(f"{label}, without denseformer"), *_answer_cells(study, others, equal)])
        if unstable:
            table.append([Cell(f"{label}, without {failed}"), *_answer_cells(study, GROUPS, equal, unstable)])
        if failing:
            others, label = groups_without(*failing), f"{label}, without {', '.join(failing)}"
            table.append([Cell(label), *_answer_cells(study, others, equal)])
            table.append(
                [Cell(f"{label}, over means of depths"), *_answer_cells(study, others, equal, over_means=True)]
            )
    columns = ["learned", "static", "learned - static"]
    return Table(["slope", *columns, *(f"{column}, over mechanisms" for column in columns)], table)


def _answer_cells(
    study: Study,
    groups: Mapping[str, Sequence[str]],
    equal: bool,
    without: Collection[Place] = (),
    over_means: bool = False,
) -> list[Cell]:
    gaps = [group_gaps(study, groups[name], equal, without) for name in ("learned", "static")]
    if over_means:
        gaps = [means_of(each) for each in gaps]
    depths = study.depths("vanilla", equal, without)
    lines = [slope(each, depths) for each in (*gaps, minus(*gaps))]
    singles = [[study.slope(model, equal, without) for model in groups[name]] for name in ("learned", "static")]
    # the intervals over mechanisms already have no seeds
    means = [None] * 3 if over_means else [*map(over_mechanisms, singles), between_mechanisms(*singles)]
    return [slope_cell(line) for line in (*lines, *means)]


def slope_cell(line: Difference | None) -> Cell:
    """Return the cell of a slope."""
    return difference_cell(line, 0, 4)


def unstable_losses(study: Study) -> Table:
    """Return the loss of each seed, where a run may have failed."""
    seeds = sorted({seed for by in study.losses.values() for seed in by})
    table = [
        cells([name, str(layers), *(number_text(study.losses.get((name, layers), {}).get(seed), 3) for seed in seeds)])
        for name, layers in study.unstable()
    ]
    return Table(["validation loss", "layers", *(f"seed {seed}" for seed in seeds)], table)


def vanilla_losses(study: Study) -> Table:
    """Return vanilla's losses at each depth and number of parameters outside the embedding."""
    places = [place for place in study.planned if place[0] in ("vanilla", *WIDER) and place in study.losses]
    table = [
        cells([str(layers), f"{study.parameters[name, layers]:,}", with_deviation(over_seeds([*losses.values()]))])
        for (name, layers), losses in ((place, study.losses[place]) for place in sorted(places, key=lambda p: p[1]))
    ]
    return Table(["layers", "vanilla's parameters outside the embedding", "validation loss"], table)


def choices(sweep: Sweep) -> dict[tuple[str, str], Group]:
    """Return the grid of rates of each mechanism and task."""
    groups = {}
    for group in groups_of(sweep):
        point = next(iter(group.grid.values())).points[0]
        groups[point.settings["model"], point.parts["task"]] = group
    return groups


def chosen_rates(sweep: Sweep) -> Table:
    """Return the learning rate that each mechanism chose at each depth, with the loss of the runs that chose it.

    Bold: at the edge of the rates tried.
    """
    groups = choices(sweep)
    models, tasks = (list(dict.fromkeys(key[place] for key in groups)) for place in (0, 1))
    table = [[Cell(model), *(_chosen_cell(groups.get((model, task))) for task in tasks)] for model in models]
    return Table(["rate, and its loss", *tasks], table)


def _chosen_cell(group: Group | None) -> Cell:
    if group is None or group.chosen is None:
        return Cell(DASH)
    loss = measure_column(group.grid[group.chosen], group.column)
    text = f"{float(group.chosen[0] or 'nan'):g}, {number_text(None if loss is None else loss.mean, 3)}"
    return Cell(text, None in group.beside(0))
