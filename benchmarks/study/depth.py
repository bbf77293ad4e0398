"""The study of depth: differences from vanilla over the number of layers, and their slopes.

docs/results/question.md defines the groups, the slopes and what they answer.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.study.differences import Difference, corrected, difference_cell, with_deviation, with_interval
from depthlm.accounting.cost import count_parameters
from depthlm.build import build_model
from depthlm.report.choice import Group, groups_of
from depthlm.report.rows import by_seed, measured, over_seeds, pooled, student_t
from depthlm.report.sweep import Sweep
from depthlm.report.tables import DASH, Cell, Table, cells, number_text

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
SEEDS = 3
EQUAL = " of as many parameters"
# where the losses of seeds differ more, a run may have failed
LARGEST_DEVIATION = 0.1

# differences in nats per token, by the number of layers and the seed
Gaps = dict[tuple[int, str], float]
# a mechanism at a number of layers
Place = tuple[str, int]


@dataclass(frozen=True)
class Study:
    """The reported validation losses by seed, of each mechanism and number of layers.

    vanilla: at each number of layers, of each number of parameters outside the embedding, ascending. parameters: of the
    mechanisms, also outside the embedding.
    """

    losses: Mapping[Place, Mapping[str, float]]
    vanilla: Mapping[int, Sequence[tuple[int, Mapping[str, float]]]]
    parameters: Mapping[Place, int]

    @property
    def layers(self) -> list[int]:
        """The numbers of layers."""
        return sorted(self.vanilla)

    def vanilla_with(self, layers: int, parameters: int) -> dict[str, float]:
        """Return vanilla's loss by seed at a number of parameters, by a power law between the two beside it."""
        points = self.vanilla[layers]
        if len(points) == 1:
            return {}
        upper = next((n for n, point in enumerate(points) if n and point[0] >= parameters), len(points) - 1)
        (few, small), (many, large) = points[upper - 1], points[upper]
        share = math.log(parameters / few) / math.log(many / few)
        return {seed: small[seed] ** (1 - share) * large[seed] ** share for seed in small if seed in large}

    def gaps(self, model: str, equal: bool = False, without: Collection[Place] = ()) -> Gaps:
        """Return by how much a mechanism's losses exceed vanilla's. equal: vanilla with as many parameters."""
        found = {}
        for layers in self.layers:
            if (model, layers) in without or ("vanilla", layers) in without:
                continue
            base = self.vanilla[layers][0][1]
            if equal:
                base = self.vanilla_with(layers, self.parameters[model, layers])
            losses = self.losses.get((model, layers), {})
            found |= {(layers, seed): losses[seed] - base[seed] for seed in losses if seed in base}
        return found

    def unstable(self) -> tuple[Place, ...]:
        """Return the places where losses deviate so much that runs may have failed."""
        return tuple(place for place, losses in self.losses.items() if _deviates(losses.values()))


def _deviates(values: Iterable[float]) -> bool:
    values = [*values]
    return len(values) > 1 and stdev(values) > LARGEST_DEVIATION


def study_of(sweep: Sweep) -> Study:
    """Return the reported losses of a sweep."""
    losses: dict[Place, dict[str, float]] = {}
    vanilla: dict[int, list[tuple[int, dict[str, float]]]] = {}
    parameters: dict[Place, int] = {}
    for row, config in zip(sweep.rows, sweep.configs, strict=True):
        counts = count_parameters(build_model(config, "meta"))
        outside = counts["total"] - counts["embedding"]
        model, layers, by = row.settings["model"], config.size.num_layers, by_seed(row, sweep.first[1])
        if model == "vanilla":
            vanilla.setdefault(layers, []).append((outside, by))
        if row.parts["task"] == f"{layers} layers":
            losses[model, layers], parameters[model, layers] = by, outside
    return Study(losses, {layers: sorted(points, key=lambda p: p[0]) for layers, points in vanilla.items()}, parameters)


def slope(gaps: Gaps, level: float = 0.95) -> Difference | None:
    """Return the slope of a least-squares line over the base-2 logarithm of the layers; None for a single depth.

    level: of the wider interval.
    """
    from scipy.stats import linregress

    if len({layers for layers, _ in gaps}) < 2 or len(gaps) < 3:
        return None
    line = linregress([math.log2(layers) for layers, _ in gaps], [*gaps.values()])
    half, wide = (student_t(len(gaps) - 2, share) * line.stderr for share in (0.95, level))
    return Difference(line.slope, line.slope - half, line.slope + half, len(gaps), abs(line.slope) > wide)


def group_gaps(study: Study, models: Sequence[str], equal: bool = False, without: Collection[Place] = ()) -> Gaps:
    """Return the mean of the gaps of some mechanisms, where all of them that are not left out have one."""
    every = {model: study.gaps(model, equal, without) for model in models}
    means = {}
    for place in dict.fromkeys(place for gaps in every.values() for place in gaps):
        wanted = [model for model in models if (model, place[0]) not in without]
        if all(place in every[model] for model in wanted):
            means[place] = fmean(every[model][place] for model in wanted)
    return means


def minus(first: Gaps, second: Gaps) -> Gaps:
    """Return the differences of the gaps that both have."""
    return {place: first[place] - second[place] for place in first if place in second}


def between_mechanisms(first: Sequence[Difference | None], second: Sequence[Difference | None]) -> Difference | None:
    """Return the difference of the mean slopes of two groups, with Welch's interval over their mechanisms."""
    from scipy.stats import ttest_ind

    slopes = [[number.mean for number in numbers if number is not None] for numbers in (first, second)]
    if min(map(len, slopes)) < 2:
        return None
    low, high = ttest_ind(*slopes, equal_var=False).confidence_interval(0.95)
    mean = fmean(slopes[0]) - fmean(slopes[1])
    return Difference(mean, float(low), float(high), sum(map(len, slopes)), low > 0 or high < 0)


def differences(study: Study, equal: bool = False) -> Table:
    """Return the difference of each mechanism from vanilla at each depth, and its slope over the depth.

    The deviation over seeds is pooled over the depths. Bold: the interval excludes 0 also with the correction for all
    differences, or all slopes, of the table. equal: vanilla has as many parameters.
    """
    models, table = [*STATIC, *LEARNED], []
    level = corrected(len(models) * len(study.layers))
    for model in models:
        gaps = study.gaps(model, equal)
        by_depth = [over_seeds([gap for (layers, _), gap in gaps.items() if layers == each]) for each in study.layers]
        numbers = [with_interval(number, level, float) for number in pooled(by_depth)]
        shown = [difference_cell(number, SEEDS) for number in numbers]
        table.append([Cell(model), *shown, difference_cell(slope(gaps, corrected(len(models))), 0)])
    title = f"minus vanilla{EQUAL if equal else ''}"
    return Table([title, *(f"{each} layers" for each in study.layers), "slope"], table)


def answers(study: Study) -> Table:
    """Return the slopes of the two groups and of their difference; also without places whose runs may have failed."""
    unstable, table = study.unstable(), []
    for without in ((), unstable) if unstable else ((),):
        left_out = f", without {', '.join(f'{model} in {layers} layers' for model, layers in without)}"
        for equal in (False, True):
            gaps = {name: group_gaps(study, models, equal, without) for name, models in GROUPS.items()}
            slopes = [[slope(study.gaps(model, equal, without)) for model in models] for models in GROUPS.values()]
            numbers = {
                "learned": slope(gaps["learned"]),
                "static": slope(gaps["static"]),
                "learned - static": slope(minus(gaps["learned"], gaps["static"])),
                "learned - static, over mechanisms": between_mechanisms(*slopes),
            }
            label = f"minus vanilla{EQUAL if equal else ''}{left_out if without else ''}"
            table.append([Cell(label), *(difference_cell(number, 0) for number in numbers.values())])
    return Table(["slope", *numbers], table)


def vanilla_losses(study: Study) -> Table:
    """Return vanilla's losses at each depth and number of parameters outside the embedding."""
    points = [(layers, *point) for layers in study.layers for point in study.vanilla[layers]]
    table = [
        cells([str(layers), f"{count:,}", with_deviation(over_seeds([*losses.values()]))])
        for layers, count, losses in points
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
    loss = measured(group.grid[group.chosen], group.column)
    text = f"{float(group.chosen[0] or 'nan'):g}, {number_text(None if loss is None else loss.mean, 3)}"
    return Cell(text, None in group.beside(0))
