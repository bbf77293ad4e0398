"""Write the tables and pictures of docs/results from the committed records of its runs.

    python benchmarks/study/page.py

The tables replace the blocks between `<!-- name -->` and `<!-- end -->` in docs/results/README.md.
"""

import itertools
import re
from collections.abc import Mapping

from benchmarks.study.archive import RESULTS, lines_of, study_sweeps
from benchmarks.study.differences import (
    corrected,
    difference_cell,
    gaps_to_vanilla,
    minus,
    paired_difference,
    rate_changes,
    relative_differences,
    row_of,
    values_of,
    with_deviation,
)
from benchmarks.study.pictures import draw_all
from depthlm.accounting.cost import count_parameters
from depthlm.build import build_model
from depthlm.config import compose_anywhere
from depthlm.config.experiment import Column
from depthlm.config.schema import run_steps
from depthlm.files import replace_text
from depthlm.report.rows import measured, over_seeds
from depthlm.report.scaling_laws import NEEDS, VIEWS, curves, fit_table, needed_text, savings
from depthlm.report.sweep import Sweep
from depthlm.report.tables import DASH, Cell, Table, cells, markdown, number_text
from depthlm.runs.records import COMPLETE

PAGE = RESULTS / "README.md"
# the mechanisms that the paper of Depth-Attention compares it with
RIVALS = ("uniform_mix", "attention_residuals", "attention_residuals_recency", "mhc", "denseformer")
VIEWS_WITH_TIME = VIEWS | {"time": Column(title="training time (s, one thread)", metric="training_seconds")}


def main() -> None:
    sweeps = study_sweeps()
    replace_text(PAGE, with_blocks(PAGE.read_text(), blocks(sweeps)))
    draw_all(sweeps, views_of(sweeps["scaling"]), RESULTS)
    print(f"written to {PAGE}")


def views_of(scaling: Sweep) -> dict[str, Column]:
    """Return the views of the scaling laws: also by time, if the time of every complete run was measured."""
    complete = [run for run in scaling.runs if run.state == COMPLETE]
    return VIEWS_WITH_TIME if all("training_seconds" in run.summary for run in complete) else VIEWS


def with_blocks(text: str, content: dict[str, str]) -> str:
    """Return the page with the content of each block replaced. Raises KeyError for an unknown block."""
    pattern = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)
    return pattern.sub(lambda match: f"<!-- {match[1]} -->\n\n{content[match[1]]}\n\n<!-- end -->", text)


def blocks(sweeps: Mapping[str, Sweep]) -> dict[str, str]:
    """Return the tables of the page, as Markdown, by the names of their blocks. sweeps: by experiment."""
    scaling = sweeps["scaling"]
    tables = {
        "sizes": sizes(scaling),
        "shapes": sizes(sweeps["sensitivity_depth"], "size.num_layers"),
        "costs": costs(scaling),
        "losses": losses(scaling),
        "differences": _against(
            scaling, "against vanilla", {x: (x, "vanilla") for x in values_of(scaling, "model")[1:]}
        ),
        "rivals": _against(scaling, "depth_attention against", {x: ("depth_attention", x) for x in RIVALS}),
        "fits": fit_table(scaling, curves(scaling)),
        "needs": needs(scaling),
        "start": start(sweeps["start"]),
        "rates": rates(sweeps["rates"]),
        "embedding": sensitivity(sweeps["sensitivity_embedding"], "size.embedding_init_std"),
        "rate": sensitivity(sweeps["sensitivity_rate"], "optimizer.lr"),
        "depth": sensitivity(sweeps["sensitivity_depth"], "size.num_layers"),
        "dca": sensitivity(sweeps["sensitivity_rate_dca"], "optimizer.lr"),
    }
    return {"state": state(sweeps), "point": point(scaling)} | {name: markdown(table) for name, table in tables.items()}


def state(sweeps: Mapping[str, Sweep]) -> str:
    """Return how many runs of each experiment are complete."""
    counts = []
    for experiment, sweep in sweeps.items():
        complete = sum(run.state == COMPLETE for run in sweep.runs)
        counts.append(f"{complete} of {len(sweep.runs)} (`{experiment}`)")
    return f"Complete runs: {', '.join(counts)}."


def point(sweep: Sweep) -> str:
    """Return what the run gives that the page repeats, and where that holds."""
    row = row_of(sweep, model="vanilla", size="nano_60k")
    line = lines_of("scaling")[row.runs[row.seeds.index("1")].directory.name]
    loss, place = line["summary"]["validation_loss"], line["environment"]
    versions = f"Python {place['python']} and torch {place['torch']}"
    return f"Its validation loss is {loss} on the processor {place['device']} with {versions}."


def costs(sweep: Sweep) -> Table:
    """Return the parameters, training FLOPs and training time of each model, as ratios to vanilla's."""
    table, columns = [], views_of(sweep).values()
    for model in values_of(sweep, "model")[1:]:
        texts = []
        for size in values_of(sweep, "size"):
            rows = [row_of(sweep, model=name, size=size) for name in (model, "vanilla")]
            pairs = [[measured(row, column) for row in rows] for column in columns]
            known = [number_text(value.mean / base.mean, 2) for value, base in pairs if value and base]
            texts.append(", ".join(known) or DASH)
        table.append(cells([model, *texts]))
    return Table(["times vanilla's", *values_of(sweep, "size")], table)


def sizes(sweep: Sweep, label: str = "size") -> Table:
    """Return vanilla's sizes, their parameters and how long they train. label: the setting or task that names them."""
    compute = Column(metric="training_flops", scale=1e12)
    table = []
    for row in sweep.rows:
        if row.settings["model"] != "vanilla":
            continue
        config = compose_anywhere(row.points[0].overrides)
        size = config.size
        counts = count_parameters(build_model(config, "meta"))
        outside = counts["total"] - counts["embedding"]
        steps = run_steps(config) or 0
        tokens = steps * config.training.batch_size * config.training.sequence_length
        heads = f"{size.num_heads} ({size.num_kv_heads})"
        shape = [size.num_layers, size.hidden_size, size.intermediate_size]
        length = [counts["total"], outside, steps, tokens]
        flops = measured(row, compute)
        trillions = DASH if flops is None else number_text(flops.mean, 2)
        rest = [number_text(tokens / outside, 2), trillions, f"{config.optimizer.lr:g}"]
        texts = [*map(str, shape), heads, *(f"{number:,}" for number in length), *rest]
        table.append(cells([row.settings.get(label) or row.parts[label], *texts]))
    head = "layers, D, MLP, heads (key/value), parameters, outside the embedding, steps, tokens, tokens per parameter"
    return Table(["vanilla", *head.split(", "), "TFLOPs", "rate"], table)


def losses(sweep: Sweep) -> Table:
    """Return the validation losses: mean ± sample standard deviation over seeds."""
    column, sizes = sweep.first[1], values_of(sweep, "size")
    table: list[list[Cell]] = []
    for model in values_of(sweep, "model"):
        rows = (row_of(sweep, model=model, size=size) for size in sizes)
        table.append(cells([model, *(with_deviation(measured(row, column)) for row in rows)]))
    return Table(["validation loss", *sizes], table)


def _against(sweep: Sweep, title: str, models: dict[str, tuple[str, str]]) -> Table:
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


def start(sweep: Sweep) -> Table:
    """Return vanilla's loss by the start of its weights: the best learning rate of each."""
    table = []
    for size in values_of(sweep, "size"):
        rows = [row for row in sweep.rows if row.settings["size"] == size]
        for pair in sorted({(r.settings["size.init_std"], r.settings["size.embedding_init_std"]) for r in rows}):
            started = [r for r in rows if (r.settings["size.init_std"], r.settings["size.embedding_init_std"]) == pair]
            by_rate = {r.settings["optimizer.lr"]: measured(r, sweep.first[1]) for r in started}
            known = {rate: number.mean for rate, number in by_rate.items() if number is not None}
            best = min(known, key=lambda rate: known[rate], default=None)
            tried = ", ".join(sorted(by_rate, key=float))
            loss = None if best is None else known[best]
            table.append(cells([size, *pair, tried, best or DASH, number_text(loss, 3)]))
    head = ["size", "init_std", "embedding_init_std", "rates tried", "best rate", "validation loss"]
    return Table(head, table)


def rates(sweep: Sweep) -> Table:
    """Return the loss of each mechanism at the learning rate of the study, and its changes at the others tried.

    Bold: changes whose interval excludes 0 also with the correction for the number of changes.
    """
    rate, others, changes = rate_changes(sweep)
    table = []
    for model, by_rate in changes.items():
        row = row_of(sweep, model=model, optimizer__lr=rate)
        changed = [difference_cell(change, len(row.points)) for change in by_rate]
        table.append([Cell(model), Cell(with_deviation(measured(row, sweep.first[1]))), *changed])
    return Table(["validation loss", f"at {rate}", *(f"change at {other}" for other in others)], table)


def sensitivity(sweep: Sweep, key: str) -> Table:
    """Return vanilla's loss and the differences of the others at each value of a setting, then how both change."""
    models, values = values_of(sweep, "model"), values_of(sweep, key)
    changes = list(itertools.combinations(values, 2))
    level = corrected(len(values) * len(models[1:]) + len(changes) * len(models))
    planned = len(sweep.rows[0].points)
    table, gaps = [], {value: gaps_to_vanilla(sweep, key, value) for value in values}
    for value, by_model in gaps.items():
        against = [difference_cell(paired_difference(by_model[model], level), planned) for model in models[1:]]
        table.append([Cell(value), Cell(with_deviation(over_seeds(list(by_model["vanilla"].values())))), *against])
    for before, after in changes:
        moved = [
            difference_cell(paired_difference(minus(gaps[after][m], gaps[before][m]), level), planned) for m in models
        ]
        table.append([Cell(f"change from {before} to {after}"), *moved])
    return Table([key, "vanilla", *(f"{model} - vanilla" for model in models[1:])], table)


if __name__ == "__main__":
    main()
