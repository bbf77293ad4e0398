"""Tables of a study of sizes: shapes, costs, losses, differences, and what vanilla needs for the same loss."""

from dataclasses import replace

from benchmarks.study.differences import (
    corrected,
    difference_cell,
    gaps_to_vanilla,
    minus,
    paired_difference,
    relative_differences,
    row_of,
    values_of,
    with_deviation,
)
from depthlm.accounting.cost import count_parameters
from depthlm.build import build_model
from depthlm.config.experiment import Column
from depthlm.config.schema import run_steps
from depthlm.report.rows import Row, by_seed, measure_column
from depthlm.report.scaling_laws import NEEDS, VIEWS, curves, needed_text, savings
from depthlm.report.sweep import Sweep
from depthlm.report.tables import DASH, Cell, Table, cells, number_text
from depthlm.runs.records import COMPLETE

VIEWS_WITH_TIME = VIEWS | {"time": Column(title="training time (s, one thread)", metric="training_seconds")}


def with_depth(sizes: Sweep, depth: Sweep) -> Sweep:
    """Return the study of sizes with the 12 layers of the study of depth, which have the shape of nano_330k.

    Its rows are in the order of the sizes.
    """
    pairs = list(zip(sizes.rows, sizes.configs, strict=True))
    for row, config in zip(depth.rows, depth.configs, strict=True):
        if row.parts["task"] == "12 layers":
            pairs.append((_of_size(row, "nano_330k"), config))
    pairs.sort(key=lambda pair: run_steps(pair[1]) or 0)
    return replace(sizes, rows=[row for row, _ in pairs], configs=[config for _, config in pairs])


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


def views_of(scaling: Sweep) -> dict[str, Column]:
    """Return the views of the scaling laws: also by time, if the time of every complete run was measured."""
    complete = [run for run in scaling.runs if run.state == COMPLETE]
    return VIEWS_WITH_TIME if all("training_seconds" in run.summary for run in complete) else VIEWS


def shapes(sweep: Sweep, label: str = "size") -> Table:
    """Return vanilla's sizes, their parameters and how long they train. label: the setting or task that names them."""
    compute = Column(metric="training_flops", scale=1e12)
    table = []
    for row in sweep.rows:
        if row.settings["model"] != "vanilla":
            continue
        config = row.points[0].config_elsewhere()
        size = config.size
        counts = count_parameters(build_model(config, "meta"))
        outside = counts["total"] - counts["embedding"]
        steps = run_steps(config) or 0
        tokens = steps * config.training.batch_size * config.training.sequence_length
        heads = f"{size.num_heads} ({size.num_kv_heads})"
        shape = [size.num_layers, size.hidden_size, size.intermediate_size]
        length = [counts["total"], outside, steps, tokens]
        flops = measure_column(row, compute)
        trillions = DASH if flops is None else number_text(flops.mean, 2)
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
    table: list[list[Cell]] = []
    for model in values_of(sweep, "model"):
        rows = (row_of(sweep, model=model, size=size) for size in sizes)
        table.append(cells([model, *(with_deviation(measure_column(row, column)) for row in rows)]))
    return Table(["validation loss", *sizes], table)


def against(sweep: Sweep, title: str, models: dict[str, tuple[str, str]]) -> Table:
    """Return the differences of pairs of models at each size, in nats per token, and over all sizes, in percent.

    Bold: those whose interval excludes 0 also with the correction for the number of cells.
    """
    table, sizes = [], values_of(sweep, "size")
    level = corrected((len(sizes) + 1) * len(models))
    for label, (model, reference) in models.items():
        pairs = [(row_of(sweep, model=model, size=s), row_of(sweep, model=reference, size=s)) for s in sizes]
        each, overall = relative_differences(sweep, pairs, level)
        planned = [len(row.points) for row, _ in pairs]
        differing = [difference_cell(number, seeds) for number, seeds in zip(each, planned, strict=True)]
        table.append([Cell(label), *differing, difference_cell(overall, sum(planned), 2)])
    return Table([title, *sizes, "all sizes, in %"], table)


def needs(sweep: Sweep) -> Table:
    """Return what vanilla needs for the losses of the others, by parameters, compute and training time."""
    views = views_of(sweep)
    table = []
    for entry in savings(sweep, curves(sweep, views)):
        row = entry.size.row
        # one seed says nothing
        texts = [needed_text(n if n is not None and n.interval is not None else None) for n in entry.needs.values()]
        table.append(cells([f"{row.settings['model']}, {row.settings['size']}", *texts]))
    return Table(["vanilla needs", *(NEEDS[view] for view in views)], table)


def changes(first: Sweep, own: Sweep) -> Table:
    """Return the differences from vanilla at the one rate of the first study, and where each has its own rate.

    Every interval comes from its own seeds. The last column has the largest change of a run that has the same rate.
    """
    table = []
    for size in values_of(own, "size"):
        then, now = (gaps_to_vanilla(sweep, "size", size) for sweep in (first, own))
        for model in [model for model in now if model in then]:
            rows = [row_of(sweep, model=model, size=size) for sweep in (first, own)]
            one, new = (f"{row.points[0].config_elsewhere().optimizer.lr:g}" for row in rows)
            both = [by_seed(row, own.first[1]) for row in rows]
            moved = [abs(change) for change in minus(*both).values()] if one == new else []
            pairs = [None if model == "vanilla" else paired_difference(gaps[model], 0.95) for gaps in (then, now)]
            before, after = (difference_cell(p, len(row.points)).text for p, row in zip(pairs, rows, strict=True))
            texts = [one, before, new, after, number_text(max(moved), 3) if moved else DASH]
            table.append(cells([f"{model}, {size}", *texts]))
    head = ["one rate", "minus vanilla at one rate", "own rate", "minus vanilla at own rates", "same run, change"]
    return Table(["mechanism, size", *head], table)
