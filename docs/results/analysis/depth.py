"""The study of depth: differences from vanilla over the number of layers, and their slopes.

docs/results/question.md defines the groups, the slopes and what they answer.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from depthlm.report.choice import Group, groups_of
from depthlm.report.rows import (
    Measured,
    by_seed,
    measure_column,
    normal_quantile,
    over_seeds,
    pool_deviations,
    student_t,
)
from depthlm.report.sweep import Sweep
from depthlm.report.tables import DASH, Cell, Table, cells, number_text
from docs.results.analysis.differences import (
    Difference,
    corrected,
    difference_cell,
    minus,
    with_deviation,
    with_interval,
)

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
# vanilla with its own MLP and with wider ones
WIDTHS = ("vanilla", "vanilla, wider", "vanilla, widest")
EQUAL = " with equal parameters"
# where the losses of seeds differ more, a run may have failed
LARGEST_DEVIATION = 0.1

# differences in nats per token, by the number of layers and the seed
Gaps = Mapping[tuple[int, str], float]
# a mechanism, or a wider vanilla, and its number of layers
Place = tuple[str, int]
# where no luck of a choice is added
NO_LUCK: Mapping[int, float] = {}


@dataclass(frozen=True)
class Study:
    """The reported validation losses, by mechanism, number of layers and seed. parameters: outside the embedding.

    luck: the standard deviation that the choice of a rate adds to the mean loss of a place.
    """

    losses: Mapping[Place, Mapping[str, float]]
    parameters: Mapping[Place, int]
    luck: Mapping[Place, float]

    @property
    def layers(self) -> list[int]:
        """The numbers of layers."""
        return sorted({layers for _, layers in self.losses})

    def depths(self, model: str, equal: bool = False, without: Collection[Place] = ()) -> list[int]:
        """Return the numbers of layers at which a mechanism is compared with vanilla."""
        bases = WIDTHS if equal else WIDTHS[:1]
        return [n for n in self.layers if not any((name, n) in without for name in (model, *bases))]

    def vanilla_beside(self, layers: int, parameters: int) -> dict[Place, float]:
        """Return the two vanilla models beside a number of parameters, with their exponents in a power law there."""
        places = [(name, layers) for name in WIDTHS if (name, layers) in self.losses]
        counts = [self.parameters[place] for place in places]
        upper = next((n for n, count in enumerate(counts) if n and count >= parameters), len(counts) - 1)
        few, many = counts[upper - 1 : upper + 1]
        share = math.log(parameters / few) / math.log(many / few)
        return {places[upper - 1]: 1 - share, places[upper]: share}

    def vanilla_with(self, layers: int, parameters: int) -> dict[str, float]:
        """Return vanilla's loss by seed at a number of parameters, by a power law between the two beside it."""
        shares = self.vanilla_beside(layers, parameters)
        seeds = self.losses["vanilla", layers]
        return {seed: math.prod(self.losses[place][seed] ** share for place, share in shares.items()) for seed in seeds}

    def gaps(self, model: str, equal: bool = False, without: Collection[Place] = ()) -> Gaps:
        """Return by how much a mechanism's losses exceed vanilla's. equal: those of vanilla with equal parameters."""
        gaps = {}
        for layers in self.depths(model, equal, without):
            losses, base = (self.losses[name, layers] for name in (model, "vanilla"))
            if equal:
                base = self.vanilla_with(layers, self.parameters[model, layers])
            gaps |= {(layers, seed): losses[seed] - base[seed] for seed in losses}
        return gaps

    def luck_of(self, weights: Mapping[str, float], equal: bool = False) -> dict[int, float]:
        """Return the standard deviation that choices add to a weighted sum of gaps, by the number of layers.

        weights: of each mechanism's gap.
        """
        luck = {}
        for layers in self.layers:
            share = defaultdict[Place, float](float)
            for model, weight in weights.items():
                share[model, layers] += weight
                base = {("vanilla", layers): 1.0}
                if equal:
                    base = self.vanilla_beside(layers, self.parameters[model, layers])
                for place, part in base.items():
                    share[place] -= weight * part
            luck[layers] = math.hypot(*(part * self.luck[place] for place, part in share.items()))
        return luck

    def unstable(self) -> list[Place]:
        """Return the places where a run may have failed, since the seeds differ much."""
        return [place for place, losses in self.losses.items() if stdev(losses.values()) > LARGEST_DEVIATION]

    def failing(self) -> list[str]:
        """Return the mechanisms with such places."""
        places = self.unstable()
        return [model for model in (*STATIC, *LEARNED) if any(name == model for name, _ in places)]


def study_of(sweep: Sweep) -> Study:
    """Return the reported losses of a sweep."""
    losses, parameters, luck = {}, {}, {}
    for row, config in zip(sweep.rows, sweep.configs, strict=True):
        layers, _, width = row.parts["task"].partition(" layers")
        place = f"{row.settings['model']}{width}", int(layers)
        losses[place], luck[place] = by_seed(row, sweep.first[1]), sweep.luck[row.label]
        parameters[place] = row.runs[0].summary["parameters"] - config.size.vocab_size * config.size.hidden_size
    return Study(losses, parameters, luck)


def slope(gaps: Gaps, level: float = 0.95, luck: Mapping[int, float] = NO_LUCK) -> Difference:
    """Return the slope of a least-squares line over the base-2 logarithm of the layers.

    level: of the wider interval. luck: of the mean gap at each number of layers (`Study.luck_of`).
    """
    from scipy.stats import linregress

    x = [math.log2(layers) for layers, _ in gaps]
    line, centre = linregress(x, [*gaps.values()]), fmean(x)
    squares = sum((each - centre) ** 2 for each in x)
    seeds = Counter(layers for layers, _ in gaps)
    chance = math.hypot(*(seeds[n] * (math.log2(n) - centre) / squares * luck.get(n, 0.0) for n in seeds))
    half, wide = (
        math.hypot(student_t(len(gaps) - 2, share) * line.stderr, normal_quantile(share) * chance)
        for share in (0.95, level)
    )
    return Difference(line.slope, line.slope - half, line.slope + half, abs(line.slope) > wide)


def groups_without(*models: str) -> dict[str, tuple[str, ...]]:
    """Return the two groups without some mechanisms."""
    return {group: tuple(m for m in members if m not in models) for group, members in GROUPS.items()}


def group_gaps(study: Study, models: Sequence[str], equal: bool = False, without: Collection[Place] = ()) -> Gaps:
    """Return the mean of the gaps of some mechanisms.

    Where a mechanism is left out, its own line through its other depths stands for it: without it, the level of the
    mechanism would become a slope of the group.
    """
    every = {model: {**study.gaps(model, equal, without)} for model in models}
    for model, gaps in every.items():
        if missing := [n for n in study.depths("vanilla", equal, without) if (model, n) in without]:
            line, mean = slope(gaps), fmean(gaps.values())
            centre = fmean(math.log2(layers) for layers, _ in gaps)
            seeds = {seed for _, seed in gaps}
            gaps |= {(n, seed): mean + line.mean * (math.log2(n) - centre) for n in missing for seed in seeds}
    first = next(iter(every.values()))
    return {key: fmean(gaps[key] for gaps in every.values()) for key in first}


def means_of(gaps: Gaps) -> Gaps:
    """Return the mean of the gaps at each depth, as those of one seed."""
    return {(n, ""): fmean(gap for (layers, _), gap in gaps.items() if layers == n) for n, _ in gaps}


def between_mechanisms(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return the difference of the mean slopes of two groups, with Welch's interval over their mechanisms."""
    from scipy.stats import ttest_ind

    low, high = ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    return Difference(fmean(first) - fmean(second), float(low), float(high), low > 0 or high < 0)


def pooled_depths(gaps: Gaps, luck: Mapping[int, float]) -> list[Measured]:
    """Return the mean of gaps at each depth, with the deviation over seeds pooled over the depths. luck: of each."""
    each_depth = [[gap for (layers, _), gap in gaps.items() if layers == each] for each in luck]
    pooled = pool_deviations([over_seeds(values) for values in each_depth])
    return [replace(number, luck=chance) for number, chance in zip(pooled, luck.values(), strict=True)]


def pooled_group(study: Study, models: Sequence[str]) -> list[Measured]:
    """Return the mean gap of some mechanisms at each depth, with its deviation and luck."""
    return pooled_depths(group_gaps(study, models), study.luck_of(equal_weights(models)))


def equal_weights(models: Sequence[str]) -> dict[str, float]:
    """Return the weight of each of some mechanisms in their mean."""
    return dict.fromkeys(models, 1 / len(models))


def differences(study: Study, equal: bool = False) -> Table:
    """Return the difference of each mechanism from vanilla at each depth, its mean, and its slope over the depth.

    equal: vanilla with equal parameters.
    """
    gaps = {model: (study.gaps(model, equal), study.luck_of({model: 1}, equal)) for model in (*STATIC, *LEARNED)}
    return _over_depths(study, f"minus vanilla{EQUAL if equal else ''}", gaps)


def rivals(study: Study) -> Table:
    """Return the differences of Depth-Attention from the mechanisms with which its paper compares it."""
    own = study.gaps("depth_attention")
    gaps = {
        model: (minus(own, study.gaps(model)), study.luck_of({"depth_attention": 1, model: -1})) for model in RIVALS
    }
    return _over_depths(study, "depth_attention minus", gaps)


def _over_depths(study: Study, title: str, gaps: Mapping[str, tuple[Gaps, Mapping[int, float]]]) -> Table:
    """Return each mean of gaps at each depth, over the depths with the deviation pooled over them, and its slopes.

    The last slope is that of the means of the depths. gaps: with their luck. Bold: the interval excludes 0 also with
    the correction for all differences, all means, or all slopes, of the table.
    """
    table, depths = [], study.layers
    level, narrow = corrected(len(gaps)), corrected(len(gaps) * len(depths))
    for label, (each, luck) in gaps.items():
        numbers = pooled_depths(each, luck)
        chance = math.hypot(*luck.values()) / len(luck)
        mean = replace(numbers[0], mean=fmean(number.mean for number in numbers), count=len(each), luck=chance)
        shown = [difference_cell(with_interval(number, narrow)) for number in numbers]
        mean_cell = difference_cell(with_interval(mean, level))
        slopes = slope(each, level, luck), slope(means_of(each), level)
        table.append([Cell(label), *shown, mean_cell, *(difference_cell(each, 4) for each in slopes)])
    head = [*(f"{layers} layers" for layers in depths), "mean", "slope", "slope over means of depths"]
    return Table([title, *head], table)


def answers(study: Study) -> Table:
    """Return the slopes of the two groups and of their difference, with 95% intervals.

    They are also given over mechanisms, which takes those of a group as a sample; by the means of the depths alone,
    since the seeds of a depth share the choice of a rate; without DenseFormer; without places whose runs may have
    failed; and without their mechanisms. Bold: the interval excludes 0.
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
            others, label = groups_without(*failing), f"{label}, without {', '.join(failing)}"
            table.append([Cell(label), *_answer_cells(study, others, equal)])
            means = _answer_cells(study, others, equal, over_means=True)
            table.append([Cell(f"{label}, over means of depths"), *means])
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
    # the scatter of the means about a line has the luck of their choices; where a line stands for depths left out, the
    # weights of the other depths are not those of a slope
    luck: list[Mapping[int, float]] = [NO_LUCK] * 3
    if over_means:
        gaps = [means_of(each) for each in gaps]
    elif not without:
        learned, static = equal_weights(groups["learned"]), equal_weights(groups["static"])
        both = learned | {model: -weight for model, weight in static.items()}
        luck = [study.luck_of(weights, equal) for weights in (learned, static, both)]
    lines: list[Difference | None] = [
        slope(each, luck=chance) for each, chance in zip((*gaps, minus(*gaps)), luck, strict=True)
    ]
    if over_means:
        # the intervals over mechanisms already have no seeds
        lines += [None] * 3
    else:
        singles = [
            [slope(study.gaps(model, equal, without)).mean for model in groups[name]] for name in ("learned", "static")
        ]
        lines += [with_interval(over_seeds(slopes)) for slopes in singles] + [between_mechanisms(*singles)]
    return [difference_cell(line, 4) for line in lines]


def unstable_losses(study: Study) -> Table:
    """Return the loss of each seed, where a run may have failed."""
    losses = {place: study.losses[place] for place in study.unstable()}
    table = [
        cells([name, str(layers), *(number_text(loss, 3) for loss in by_seed.values())])
        for (name, layers), by_seed in losses.items()
    ]
    return Table(["validation loss", "layers", *(f"seed {seed}" for seed in next(iter(losses.values())))], table)


def vanilla_losses(study: Study) -> Table:
    """Return vanilla's losses at each depth and number of parameters outside the embedding."""
    table = [
        cells([str(layers), f"{study.parameters[name, layers]:,}", with_deviation([*losses.values()])])
        for (name, layers), losses in sorted(study.losses.items(), key=lambda item: item[0][1])
        if name in WIDTHS
    ]
    return Table(["layers", "vanilla's parameters outside the embedding", "validation loss"], table)


def losses(study: Study) -> Table:
    """Return the loss of each mechanism at each depth, the lowest of a depth in bold."""
    models, table = ("vanilla", *STATIC, *LEARNED), []
    best = {layers: best_at(study, layers) for layers in study.layers}
    for model in models:
        texts = {layers: with_deviation([*study.losses[model, layers].values()]) for layers in study.layers}
        table.append([Cell(model), *(Cell(text, best[layers] == model) for layers, text in texts.items())])
    return Table(["validation loss", *(f"{layers} layers" for layers in study.layers)], table)


def best_at(study: Study, layers: int) -> str:
    """Return the model with the lowest loss at a depth."""
    return min(("vanilla", *STATIC, *LEARNED), key=lambda model: fmean(study.losses[model, layers].values()))


def against_the_shallowest(study: Study) -> Table:
    """Return how the best model at each other depth differs from vanilla with the fewest layers, by seed."""
    table, first = [], ("vanilla", study.layers[0])
    for place in ((best_at(study, layers), layers) for layers in study.layers[1:]):
        number = over_seeds([loss - study.losses[first][seed] for seed, loss in study.losses[place].items()])
        luck = math.hypot(study.luck[place], study.luck[first])
        table.append([*cells([str(place[1]), place[0]]), difference_cell(with_interval(replace(number, luck=luck)))])
    return Table(["layers", "lowest loss", f"minus vanilla with {first[1]} layers"], table)


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
    if group is None:
        return Cell(DASH)
    loss = measure_column(group.grid[group.chosen], group.column)
    return Cell(f"{float(group.chosen):g}, {number_text(loss.mean, 3)}", None in group.beside())
