"""What each row costs beside its loss: parameters, training FLOPs, training time and the memory of generation."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from depthlm.config.experiment import Column
from depthlm.report.figures.style import mechanism_of, style_of
from depthlm.report.rows import FACTS, Row, measure_column
from depthlm.report.scaling_laws import VIEWS, curves, savings, savings_table
from depthlm.report.sweep import Sweep, references_text
from depthlm.report.tables import DASH, Table, cells, markdown, number_text
from depthlm.runs.plots import distinct, grid, legend_below, log_ticks, save, subplots
from depthlm.runs.records import RunRecord, finite

# tokens of the sequence that is generated
CONTEXT = 32_768
# the standard error of a run's mean time per token, relative to it, above which its training time is unknown, and the
# fewest rows of metrics.jsonl from which it is estimated
PRECISION, FEWEST_ROWS = 0.02, 10
# bytes of a parameter in 16 bits
PARAMETER_BYTES = 2
COSTS = VIEWS | {
    "time": Column(title="training time (s)", metric="training_seconds"),
    "generation": Column(title=f"memory of generation (MB, {CONTEXT:,} tokens)", metric="generation_bytes", scale=1e6),
}
LEGEND = (
    "Costs are multiples of the reference's, mean over seeds. Training time: tokens over tokens per second, without "
    "the first logged steps, which compile, so it only compares runs of one kind of machine; unknown where the logged "
    f"speeds of a run do not determine it within {PRECISION:.0%}. Memory of generation: parameters and the KV cache of "
    f"one sequence of {CONTEXT:,} tokens, both in 16 bits. Bars in the figure: 95% intervals over seeds."
)


def with_costs(sweep: Sweep) -> Sweep:
    """Return the sweep with the training time and the memory of generation in the summaries of its runs."""
    rows = [replace(row, runs=[_with_costs(run) for run in row.runs]) for row in sweep.rows]
    return replace(sweep, rows=rows)


def _with_costs(run: RunRecord) -> RunRecord:
    tokens, seconds_per_token = run.number("tokens"), _steady_time(run)
    parameters, cached = run.number("parameters"), run.number("cache_bytes_per_token")
    derived = {}
    if tokens and seconds_per_token:
        derived["training_seconds"] = tokens * seconds_per_token
    if parameters and cached is not None:
        derived["generation_bytes"] = PARAMETER_BYTES * parameters + CONTEXT * cached
    return replace(run, summary=derived | run.summary)


def _steady_time(run: RunRecord) -> float | None:
    """Return the mean time per token in seconds; None where the logged speeds of a run do not determine it."""
    # the first row has the time of compilation and of first allocations
    speeds = [speed for row in run.rows[1:] if (speed := finite(row.get("tokens_per_second")))]
    if len(speeds) < FEWEST_ROWS:
        return None
    times = [1 / speed for speed in speeds]
    return fmean(times) if stdev(times) / math.sqrt(len(times)) <= PRECISION * fmean(times) else None


def cost_parts(sweep: Sweep, folder: Path) -> list[str]:
    """Return the section of a report in Markdown; empty where no two mechanisms are compared.

    Draws `equal_cost.png` into the folder. Raises OSError.
    """
    path, sweep = folder / "equal_cost.png", with_costs(sweep)
    complete = [row for row in sweep.rows if measure_column(row, sweep.first[1]) is not None]
    compares = sweep.experiment.figure == "scaling" or len({row.points[0].mechanism for row in complete}) > 1
    if not complete or not compares or sweep.first[1].metric in FACTS:
        # the figure of an earlier report must not be shown in this one
        path.unlink(missing_ok=True)
        return []
    draw_costs(sweep, complete, path)
    fitted = curves(sweep, COSTS)
    tables = cost_table(sweep, complete), savings_table(sweep, fitted, savings(sweep, fitted))
    shown = [markdown(table) for table in tables if table is not None]
    return ["## Equal cost", *shown, LEGEND, "![Equal cost](equal_cost.png)"]


def cost_table(sweep: Sweep, rows: Sequence[Row]) -> Table | None:
    """Return the costs of these rows as multiples of those of their references; None without any."""
    lines, digits = [], sweep.first[1].digits
    entries = [entry for entry in sweep.differences() if entry.reference is not None and entry.row in rows]
    for entry in entries:
        assert entry.reference is not None
        loss = measure_column(entry.row, sweep.first[1])
        texts = [entry.row.label, number_text(None if loss is None else loss.mean, digits)]
        for column in COSTS.values():
            ours, theirs = measure_column(entry.row, column), measure_column(entry.reference, column)
            texts.append(DASH if not (ours and theirs and theirs.mean) else number_text(ours.mean / theirs.mean, 3))
        lines.append(cells(texts))
    title = f"Costs as multiples of those of {references_text(entries)}"
    head = ["", "loss", "parameters", "training FLOPs", "training time", "memory of generation"]
    return Table(head, lines, title) if lines else None


def draw_costs(sweep: Sweep, rows: Sequence[Row], path: Path) -> None:
    """Draw the first column of these rows over each cost that a row has, a panel each, with 95% intervals."""
    name, column = sweep.first
    numbers = sweep.pooled_numbers()
    series = [each for each in sweep.series if any(row in rows for row in each.rows)]
    styles, names = style_of([mechanism_of(each.rows[0]) for each in series]), distinct([each.name for each in series])
    shown = [cost for cost in COSTS.values() if any(measure_column(row, cost) is not None for row in rows)]
    rows_of_panels = math.ceil(len(shown) / 2)
    figure, axes = subplots(2, 9.6, 0.6 + 3.6 * rows_of_panels, rows=rows_of_panels, sharey=True)
    panels = list(axes.flat)
    for empty in panels[len(shown) :]:
        empty.remove()
    for panel, cost in zip(panels, shown, strict=False):
        for each, style, label in zip(series, styles, names, strict=True):
            pairs = [(measure_column(row, cost), numbers[row.label]) for row in each.rows]
            points = [(x.mean, y.mean, y.interval or 0.0) for x, y in pairs if x is not None and y is not None]
            if points:
                panel.errorbar(
                    *zip(*points, strict=True), fmt=style.marker, color=style.colour,
                    ms=7, mec="white", mew=0.6, elinewidth=1.2, label=label, zorder=3,
                )  # fmt: skip
        panel.set_xscale("log")
        log_ticks(panel.xaxis, panel.get_xlim(), counts=True)
        panel.set_xlabel(cost.title)
        grid(panel)
    figure.supylabel(f"{column.title or name} ({column.better} is better)", fontsize="medium")
    legend_below(figure, panels[: len(shown)], 5)
    save(figure, path, sweep.stamp(), sweep.experiment.title)
