"""Write the tables and pictures of docs/results from the committed records of its runs and of the coordinate check.

    python docs/results/analysis/page.py

The tables replace the blocks between `<!-- name -->` and `<!-- end -->` in the pages.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthlm.counts import format_count
from depthlm.files import replace_text
from depthlm.report.figures.scaling import draw_scaling
from depthlm.report.rows import Row
from depthlm.report.scaling_laws import curves, fit_table, savings
from depthlm.report.sweep import Sweep
from depthlm.report.tables import Table, cells, markdown, number_text, signed_text
from depthlm.runs.records import WAITING
from depthlm.sweeps import Point
from docs.results.analysis import completep, depth, transfer
from docs.results.analysis.archive import RESULTS, lines_of, points_of, rows_of, sweep_of
from docs.results.analysis.differences import row_of, with_deviation
from docs.results.analysis.interventions import COSTS
from docs.results.analysis.pictures import (
    draw_choices,
    draw_completep,
    draw_differences,
    draw_interventions,
    draw_slopes,
)
from docs.results.analysis.sizes import (
    VIEWS_WITH_TIME,
    against_vanilla,
    at_every_size,
    changes,
    costs,
    depths_as_sizes,
    losses,
    needs,
    shapes,
    with_depth,
)

PAGES = [RESULTS / name for name in ("README.md", "tables.md", "method.md")]
# the layers of the models with interventions
LAYERS = "12"
# the lines of interventions.py, by mechanism
Results = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Records:
    """What the pages show. first: the study of sizes with one rate for all. completep: may lack runs."""

    depth: Sweep
    sizes: Sweep
    first: Sweep
    interventions: Results
    completep: Sweep


def read_records() -> Records:
    """Return the committed records. Ends the command if some are missing."""
    sweeps = [sweep_of(name) for name in ("depth", "sizes", "scaling")]
    rows = [row for sweep in sweeps for row in (*sweep.rows, *sweep.selection)]
    if missing := sum(run.state == WAITING for row in rows for run in row.runs):
        raise SystemExit(
            f"{format_count(missing, 'run')} without a record; python docs/results/analysis/archive.py --missing "
            "prints their overrides"
        )
    return Records(*sweeps, interventions(), sweep_of("completep"))


def main() -> None:
    records, rows = read_records(), rows_of("transfer")
    content = blocks(records) | transfer.blocks(rows)
    for page in (*PAGES, transfer.PAGE):
        replace_text(page, with_blocks(page.read_text(), content))
    draw_all(records, RESULTS)
    transfer.draw_all(rows, RESULTS)
    print(f"written to {RESULTS}")


def draw_all(records: Records, folder: Path) -> None:
    """Draw the pictures of the pages into a folder."""
    study, stamp = depth.study_of(records.depth), records.depth.stamp()
    draw_differences(study, folder / "depth.png", stamp)
    draw_slopes(study, folder / "slopes.png", stamp)
    draw_choices(records.depth, folder / "choices.png")
    place = f"experiment=depthlm/depth, {LAYERS} layers, 991K tokens, 3 seeds"
    draw_interventions(records.interventions, folder / "interventions.png", place)
    sizes = at_every_size(with_depth(records.sizes, records.depth))
    fitted = curves(sizes, VIEWS_WITH_TIME)
    draw_scaling(sizes, fitted, savings(sizes, fitted), folder / "scaling.png", VIEWS_WITH_TIME)
    rescaled = completep.study_of(records.completep)
    # while runs are missing, there may be nothing to draw
    if any(rescaled.compare(name) is not None for name in completep.MECHANISMS):
        draw_completep(rescaled, folder / "completep.png", records.completep.stamp())


def with_blocks(text: str, content: Mapping[str, str]) -> str:
    """Return the page with the content of each block replaced. Raises KeyError for an unknown block."""
    pattern = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)
    return pattern.sub(lambda match: f"<!-- {match[1]} -->\n\n{content[match[1]]}\n\n<!-- end -->", text)


def blocks(records: Records) -> dict[str, str]:
    """Return the tables of the pages, as Markdown, by the names of their blocks."""
    study, own = depth.study_of(records.depth), with_depth(records.sizes, records.depth)
    sizes = at_every_size(own)
    rescaled = completep.study_of(records.completep)
    tables = {
        "spent": spent(records),
        "answers": depth.answers(study),
        "differences": depth.differences(study),
        "unstable": depth.unstable_losses(study),
        "equal": depth.differences(study, equal=True),
        "rivals": depth.rivals(study),
        "losses": losses(sizes),
        "against": against_vanilla(sizes),
        "fits": fit_table(sizes, curves(sizes)),
        "needs": needs(sizes),
        "interventions": interventions_table(records.interventions),
        "changes": changes(records.first, own),
        "rates": depth.chosen_rates(records.depth),
        "rates_of_sizes": depth.chosen_rates(records.sizes),
        "costs": costs(depths_as_sizes(records.depth)),
        "costs_of_sizes": costs(sizes),
        "vanilla": depth.vanilla_losses(study),
        "losses_of_depths": depth.losses(study),
        "shallowest": depth.against_the_shallowest(study),
        "shapes": shapes(records.depth, "task"),
        "shapes_of_sizes": shapes(sizes),
        "completep": completep.results(rescaled),
        "completep_places": completep.places(rescaled),
    }
    return {"points": commands(records)} | {name: markdown(table) for name, table in tables.items()}


def interventions() -> Results:
    """Return the committed results of the interventions, by mechanism."""
    lines, results = lines_of("interventions"), dict[str, list[dict[str, Any]]]()
    for point in points_of("depth"):
        line = lines.get(Path(point.directory).name)
        if line is not None and point.settings["size.num_layers"] == LAYERS:
            results.setdefault(point.settings["model"], []).append(line)
    return results


def spent(records: Records) -> Table:
    """Return how many runs chose and reported, and how long they trained."""
    table, both = [], [records.depth, records.sizes]
    for name, sweeps in {"depth": both[:1], "sizes": both[1:], "both": both}.items():
        chose = [row for sweep in sweeps for row in sweep.selection]
        report = [row for sweep in sweeps for row in sweep.rows]
        table.append(cells([name, *_spent(chose), *_spent(report)]))
    return Table(["study", "runs to choose rates", "hours of one core", "reported runs", "hours of one core"], table)


def _spent(rows: Sequence[Row]) -> list[str]:
    runs = [run for row in rows for run in row.runs if run.state != WAITING]
    return [str(len(runs)), number_text(sum(run.number("wall_seconds") or 0.0 for run in runs) / 3600, 1)]


def interventions_table(results: Results) -> Table:
    """Return the rank correlation of each mechanism and what each intervention costs, over seeds."""
    table = []
    for model, lines in results.items():
        ranks = [line["rank"] for line in lines if line.get("rank") is not None]
        texts = [f"{lines[0].get('edges', 0)}", with_deviation(ranks, 2)]
        for name in COSTS:
            added = [line[name] - line["loss"] for line in lines if name in line]
            texts.append(with_deviation(added, text=signed_text))
        table.append(cells([model, *texts]))
    return Table(["mechanism", "edges", "rank correlation", *COSTS.values()], table)


def repeated(records: Records) -> list[tuple[Point, dict[str, Any]]]:
    """Return the runs that method.md repeats, with their lines: a short one of each study."""
    rows = {
        "sizes": row_of(records.sizes, model="vanilla", size="nano_60k"),
        "depth": row_of(records.depth, **{"model": "vanilla", "size.num_layers": "6"}),
    }
    points = {name: row.points[row.seeds.index("1")] for name, row in rows.items()}
    return [(point, lines_of(name)[Path(point.directory).name]) for name, point in points.items()]


def commands(records: Records) -> str:
    """Return the commands of the runs that method.md repeats, what each gives, and where that holds."""
    texts = []
    for point, line in repeated(records):
        where = line["environment"]
        texts.append(
            f"With a processor named {where['device']}, Python {where['python']} and torch {where['torch']}:\n\n"
            f"```sh\npython train.py {' '.join(point.overrides)}\n```\n\n"
            f"Then `validation_loss` in `{point.directory}/summary.json` is {line['summary']['validation_loss']}."
        )
    return "\n\n".join(texts)


if __name__ == "__main__":
    main()
