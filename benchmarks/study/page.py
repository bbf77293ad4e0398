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
    row_of,
    values_of,
    with_deviation,
)
from benchmarks.study.pictures import draw_all
from benchmarks.study.sizes import against, costs, losses, needs, shapes, views_of
from depthlm.files import replace_text
from depthlm.report.rows import measured, over_seeds
from depthlm.report.scaling_laws import curves, fit_table
from depthlm.report.sweep import Sweep
from depthlm.report.tables import DASH, Cell, Table, cells, markdown, number_text
from depthlm.runs.records import COMPLETE

PAGE = RESULTS / "README.md"
# the mechanisms that the paper of Depth-Attention compares it with
RIVALS = ("uniform_mix", "attention_residuals", "attention_residuals_recency", "mhc", "denseformer")


def main() -> None:
    sweeps = study_sweeps()
    replace_text(PAGE, with_blocks(PAGE.read_text(), blocks(sweeps)))
    draw_all(sweeps, views_of(sweeps["scaling"]), RESULTS)
    print(f"written to {PAGE}")


def with_blocks(text: str, content: dict[str, str]) -> str:
    """Return the page with the content of each block replaced. Raises KeyError for an unknown block."""
    pattern = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)
    return pattern.sub(lambda match: f"<!-- {match[1]} -->\n\n{content[match[1]]}\n\n<!-- end -->", text)


def blocks(sweeps: Mapping[str, Sweep]) -> dict[str, str]:
    """Return the tables of the page, as Markdown, by the names of their blocks. sweeps: by experiment."""
    scaling = sweeps["scaling"]
    tables = {
        "sizes": shapes(scaling),
        "shapes": shapes(sweeps["sensitivity_depth"], "size.num_layers"),
        "costs": costs(scaling),
        "losses": losses(scaling),
        "differences": against(
            scaling, "against vanilla", {x: (x, "vanilla") for x in values_of(scaling, "model")[1:]}
        ),
        "rivals": against(scaling, "depth_attention against", {x: ("depth_attention", x) for x in RIVALS}),
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
