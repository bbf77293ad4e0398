"""Write the tables and pictures of docs/results/depth.md from the committed records of its runs.

python benchmarks/study/depth_page.py
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.study import depth
from benchmarks.study.archive import RESULTS, lines_of, points_of, sweep_of
from benchmarks.study.depth_pictures import draw_choices, draw_differences, draw_interventions, draw_slopes
from benchmarks.study.interventions import COSTS
from benchmarks.study.page import with_blocks
from benchmarks.study.sizes import changes, own_rates, shapes
from depthlm.counts import counted
from depthlm.files import replace_text
from depthlm.report.rows import Row, number
from depthlm.report.sweep import Sweep
from depthlm.report.tables import DASH, Table, cells, markdown, number_text, signed_text
from depthlm.runs.records import WAITING

PAGE = RESULTS / "depth.md"
# of the models with interventions
LAYERS = "12"
# the lines of benchmarks/study/interventions.py, by mechanism
Results = Mapping[str, Sequence[Mapping[str, Any]]]


def main() -> None:
    sweep, results = sweep_of("depth"), interventions()
    replace_text(PAGE, with_blocks(PAGE.read_text(), blocks(sweep, sweep_of("scaling"), results)))
    study, stamp = depth.study_of(sweep), sweep.stamp()
    draw_differences(study, RESULTS / "depth.png", stamp)
    draw_slopes(study, RESULTS / "slopes.png", stamp)
    draw_choices(sweep, RESULTS / "choices.png")
    draw_interventions(results, RESULTS / "interventions.png", f"experiment=depthlm/depth, {LAYERS} layers")
    print(f"written to {PAGE}")


def blocks(sweep: Sweep, first: Sweep, results: Results) -> dict[str, str]:
    """Return the tables of the page, as Markdown, by the names of their blocks. first: the study with one rate."""
    study = depth.study_of(sweep)
    tables = {
        "answers": depth.answers(study),
        "differences": depth.differences(study),
        "equal": depth.differences(study, equal=True),
        "changes": changes(first, own_rates(sweep)),
        "vanilla": depth.vanilla_losses(study),
        "rates": depth.chosen_rates(sweep),
        "shapes": shapes(sweep, "task"),
        "interventions": interventions_table(results),
    }
    return {"state": state(sweep)} | {name: markdown(table) for name, table in tables.items()}


def interventions() -> Results:
    """Return the committed results of the interventions, by mechanism."""
    lines, results = lines_of("interventions"), dict[str, list[dict[str, Any]]]()
    for point in points_of("depth"):
        line = lines.get(Path(point.directory).name)
        if line is not None and point.settings["size.num_layers"] == LAYERS:
            results.setdefault(point.settings["model"], []).append(line)
    return results


def state(sweep: Sweep) -> str:
    """Return how many runs chose and reported, and how long they trained."""
    return f"{_spent(sweep.selection)} to choose rates, {_spent(sweep.rows)} to report them."


def _spent(rows: Sequence[Row]) -> str:
    runs = [run for row in rows for run in row.runs if run.state != WAITING]
    hours = sum(number(run, "wall_seconds") or 0.0 for run in runs) / 3600
    return f"{counted(len(runs), 'run')} ({hours:.1f} hours of one core)"


def interventions_table(results: Results) -> Table:
    """Return, of each mechanism, means over seeds of the rank correlation and of what each intervention costs."""
    table = []
    for model, lines in results.items():
        ranks = [line["rank"] for line in lines if line.get("rank") is not None]
        texts = [f"{lines[0].get('edges', 0)}", number_text(fmean(ranks), 2) if ranks else DASH]
        for name in COSTS:
            costs = [line[name] - line["loss"] for line in lines if name in line]
            texts.append(signed_text(fmean(costs), 4) if costs else DASH)
        table.append(cells([model, *texts]))
    return Table(["mechanism", "edges", "rank correlation", *COSTS.values()], table)


if __name__ == "__main__":
    main()
