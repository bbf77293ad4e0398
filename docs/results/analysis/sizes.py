"""Tables of a study of sizes: shapes, costs, losses, differences, and what vanilla needs for the same loss."""

from dataclasses import replace
from itertools import groupby
from statistics import geometric_mean

from depthlm.accounting.cost import count_parameters
from depthlm.build import build_model
from depthlm.config.experiment import Column
from depthlm.config.schema import run_steps
from depthlm.report.rows import Row, by_seed, measure_column, over_seeds
from depthlm.report.scaling_laws import NEEDS, VIEWS, curves, needed_text, savings
from depthlm.report.sweep import Sweep
from depthlm.report.tables import DASH, Cell, Table, cells, number_text
from docs.results.analysis.differences import (
    corrected,
    difference_cell,
    gaps_to_vanilla,
    minus,
    relative_differences,
    row_of,
    values_of,
    with_deviation,
    with_interval,
)

VIEWS_WITH_TIME = VIEWS | {"time": Column(title="training time (s, one thread)", metric="training_seconds")}


def with_depth(sizes: Sweep, depth: Sweep) -> Sweep:
    """Return the study of sizes with the 12 layers of the study of depth, which have the shape of nano_330k.

    Its rows are in the order of the sizes.
    """
    pairs = list(zip(sizes.rows, sizes.configs, strict=True))
    for row, config in zip(depth.rows, depth.configs, strict=True):
        if row.parts["task"] == "12 layers":
            pairs.append((_of_size(row, "nano_330k"), config))
    pairs.sort(key=lambda pair: run_steps(pair[1]))
    chose = [_of_size(row, "nano_330k") for row in depth.selection if row.parts["task"] == "12 layers"]
    rows, configs = ([pair[place] for pair in pairs] for place in (0, 1))
    return replace(sizes, rows=rows, configs=configs, selection=[*sizes.selection, *chose])


def depths_as_sizes(depth: Sweep) -> Sweep:
    """Return the study of depth without the wider models, with each number of layers as a size."""
    kept = [n for n, row in enumerate(depth.rows) if row.parts["task"].endswith("layers")]
    rows = [_of_size(depth.rows[n], depth.rows[n].parts["task"]) for n in kept]
    return replace(depth, rows=rows, configs=[depth.configs[n] for n in kept])


def _of_size(row: Row, size: str) -> Row:
    return replace(row, points=[replace(point, settings=point.settings | {"size": size}) for point in row.points])


def at_every_size(sweep: Sweep) -> Sweep:
    """Return a sweep with those of its models that have all sizes."""
    rows, sizes = sweep.rows, values_of(sweep, "size")
    found = {(row.settings["model"], row.settings["size"]) for row in rows}
    kept = [n for n, row in enumerate(rows) if all((row.settings["model"], size) in found for size in sizes)]
    return replace(sweep, rows=[rows[n] for n in kept], configs=[sweep.configs[n] for n in kept])


def shapes(sweep: Sweep, label: str = "size") -> Table:
    """Return vanilla's sizes, their parameters and how long they train. label: the setting or task that names them."""
    compute = Column(metric="training_flops", scale=1e12)
    vanilla = [row for row in sweep.rows if row.settings["model"] == "vanilla"]
    table = []
    for row in vanilla:
        config = row.points[0].config_elsewhere()
        size = config.size
        counts = count_parameters(build_model(config, "meta"))
        outside = counts["total"] - counts["embedding"]
        steps = run_steps(config)
        tokens = steps * config.training.batch_size * config.training.sequence_length
        heads = f"{size.num_heads} ({size.num_kv_heads})"
        shape = [size.num_layers, size.hidden_size, size.intermediate_size]
        length = [counts["total"], outside, steps, tokens]
        trillions = number_text(measure_column(row, compute).mean, 2)
        rest = [number_text(tokens / outside, 2), trillions, f"{config.optimizer.lr:g}"]
        texts = [*map(str, shape), heads, *(f"{number:,}" for number in length), *rest]
        table.append(cells([row.settings.get(label) or row.parts[label], *texts]))
    head = "layers, D, MLP, heads (key/value), parameters, outside the embedding, steps, tokens, tokens per parameter"
    return Table(["vanilla", *head.split(", "), "TFLOPs", "rate"], table)


def costs(sweep: Sweep) -> Table:
    """Return the parameters, training FLOPs and, where it was measured, time of each model, as ratios to vanilla's."""
    table = []
    for model in values_of(sweep, "model")[1:]:
        texts = []
        for size in values_of(sweep, "size"):
            rows = [row_of(sweep, model=name, size=size) for name in (model, "vanilla")]
            pairs = [[measure_column(row, view) for row in rows] for view in VIEWS_WITH_TIME.values()]
            texts.append(", ".join(number_text(value.mean / base.mean, 2) for value, base in pairs if value and base))
        table.append(cells([model, *texts]))
    return Table(["times vanilla's", *values_of(sweep, "size")], table)


def losses(sweep: Sweep) -> Table:
    """Return the validation losses: mean ± sample standard deviation over seeds."""
    column, sizes = sweep.first[1], values_of(sweep, "size")
    table = []
    for model in values_of(sweep, "model"):
        rows = (row_of(sweep, model=model, size=size) for size in sizes)
        table.append(cells([model, *(with_deviation([*by_seed(row, column).values()]) for row in rows)]))
    return Table(["validation loss", *sizes], table)


def against_vanilla(sweep: Sweep) -> Table:
    """Return the differences from vanilla at each size, in nats per token, and over all sizes, in percent.

    Bold: those whose interval excludes 0 also with the correction for the number of cells.
    """
    table, sizes, models = [], values_of(sweep, "size"), values_of(sweep, "model")[1:]
    level = corrected((len(sizes) + 1) * len(models))
    for model in models:
        pairs = [(row_of(sweep, model=model, size=s), row_of(sweep, model="vanilla", size=s)) for s in sizes]
        each, overall = relative_differences(sweep, pairs, level)
        table.append([Cell(model), *map(difference_cell, each), difference_cell(overall, 2)])
    return Table(["minus vanilla", *sizes, "all sizes, in %"], table)


def needs(sweep: Sweep) -> Table:
    """Return the factors that vanilla needs for the losses of the others, in parameters, compute and training time.

    The last line of a mechanism has the geometric means over all sizes, also those whose factors are not shown.
    """
    table, saved = [], savings(sweep, curves(sweep, VIEWS_WITH_TIME))
    for model, entries in groupby(saved, lambda entry: entry.size.row.settings["model"]):
        each = list(entries)
        for entry in each:
            table.append(
                cells([f"{model}, {entry.size.row.settings['size']}", *map(needed_text, entry.needs.values())])
            )
        factors = ([entry.needs[view] for entry in each] for view in VIEWS_WITH_TIME)
        means = (
            number_text(geometric_mean(need.factor for need in needs), 2) if all(needs) else DASH for needs in factors
        )
        table.append(cells([f"{model}, mean", *means]))
    return Table(["vanilla needs", *(NEEDS[view] for view in VIEWS_WITH_TIME)], table)


def changes(first: Sweep, own: Sweep) -> Table:
    """Return the differences from vanilla at the one rate of the first study, and where each has its own rate.

    Every interval comes from its own seeds. The last column has the largest change of a run that has the same rate.
    """
    table = []
    for size in values_of(own, "size"):
        then, now = (gaps_to_vanilla(sweep, size) for sweep in (first, own))
        for model in ["vanilla", *(model for model in now if model in then)]:
            rows = [row_of(sweep, model=model, size=size) for sweep in (first, own)]
            one, new = (f"{row.points[0].config_elsewhere().optimizer.lr:g}" for row in rows)
            both = [by_seed(row, own.first[1]) for row in rows]
            moved = number_text(max(map(abs, minus(*both).values())), 3) if one == new else DASH
            pairs = [None if model == "vanilla" else over_seeds([*gaps[model].values()]) for gaps in (then, now)]
            before, after = (difference_cell(pair and with_interval(pair)).text for pair in pairs)
            table.append(cells([f"{model}, {size}", one, before, new, after, moved]))
    head = ["one rate", "minus vanilla at one rate", "own rate", "minus vanilla at own rates", "same run, change"]
    return Table(["mechanism, size", *head], table)
