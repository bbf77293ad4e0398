"""The report of a sweep without an experiment: a row per setting, over its seeds, sorted by the validation loss."""

import math
from collections.abc import Sequence
from pathlib import Path

from depthlm.config.names import setting_text
from depthlm.counts import count_text
from depthlm.report.choice import choice_parts, choice_state, choice_tables, setting_of
from depthlm.report.comparison import difference_text, with_interval
from depthlm.report.equal_cost import cost_parts
from depthlm.report.experiment_report import picture, protocol_parts, result_notes, runs_table, state_line, warnings
from depthlm.report.figures.loss_curves import draw_loss_curves
from depthlm.report.rows import Measured, Row
from depthlm.report.sweep import Difference, Sweep, references_text
from depthlm.report.tables import DASH, MISSING, Cell, Table, cells, markdown, number_text
from depthlm.runs.records import COMPLETE

LEGEND = (
    "Loss: mean over the complete seeds. Difference: between runs with the same seed and otherwise the same settings. "
    "In brackets: their 95% intervals, by Student's t. The variance between seeds is pooled: of losses over the rows "
    "of one task, such as a size, of differences over those of one mechanism{luck}. Bold: the best of a task, "
    "where the intervals of its differences from all others exclude 0."
)


def sweep_report(
    sweep: Sweep, folder: Path, settings: Sequence[Table] = (), notes: Sequence[str] = ()
) -> tuple[str, list[Table]]:
    """Draw the loss curves into a folder; return the Markdown report, and its tables for the terminal.

    settings: tables of the settings that differ. notes: sentences in Markdown. Raises OSError.
    """
    results = results_table(sweep)
    parts = ["# Runs", *(f"**{warning}**" for warning in warnings(sweep)), f"{state_line(sweep.every_run)}."]
    parts += [
        *choice_state(sweep),
        *result_notes(sweep),
        *notes,
        markdown(results),
        LEGEND.format(luck=sweep.luck_text),
    ]
    parts += [*choice_parts(sweep, folder), *cost_parts(sweep, folder)]
    parts += [markdown(table) for table in settings]
    path, every_run = folder / "loss_curves.png", runs_table(sweep)
    parts += [picture("Loss curves", path, draw_loss_curves(sweep, path)), markdown(every_run), *protocol_parts(sweep)]
    # of incomplete runs, the terminal shows how far they are
    is_complete = all(run.state == COMPLETE for run in sweep.every_run)
    tables = [results, *choice_tables(sweep), *settings, *([] if is_complete else [every_run])]
    return "\n\n".join(parts) + "\n", tables


def results_table(sweep: Sweep) -> Table:
    """Return the table of the rows, the lowest validation loss first, with the differences from the baseline."""
    column = sweep.first[1]
    losses = sweep.pooled_numbers()
    differences = {entry.row.label: entry for entry in sweep.differences() if _is_alike(sweep, entry)}
    best = sweep.best(column)
    head = ["", "seeds", "validation loss ↓"]
    if differences:
        several = "the first row of the same task"
        if any(map(sweep.is_baseline, sweep.rows)):
            several = setting_text(sweep.experiment.series, sweep.experiment.baseline)
        head.append(f"against {references_text(differences.values(), several)}")
    table = []
    for row in sorted(sweep.rows, key=lambda row: loss.mean if (loss := losses[row.label]) else math.inf):
        label, loss = row.label, losses[row.label]
        shown = Cell(MISSING if loss is None else with_interval(loss, column.digits, number_text), label in best)
        texts = []
        if differences:
            texts.append(difference_text(differences[label], column) if label in differences else DASH)
        facts = [_fact(row, name) for name in ("parameters", "tokens")]
        table.append([*cells([label, _seeds(row, loss)]), shown, *cells([*texts, *facts])])
    return Table([*head, "parameters", "tokens"], table, "Results")


def _is_alike(sweep: Sweep, entry: Difference) -> bool:
    """Return whether a row differs from its reference in the series or the mechanism alone."""
    if entry.reference is None:
        return False
    allowed = sweep.experiment.series, setting_of(sweep)
    differing = entry.row.settings.items() ^ entry.reference.settings.items()
    return all(name in allowed or name.startswith("model") for name, _ in differing)


def _seeds(row: Row, loss: Measured | None) -> str:
    """Return how many seeds the loss is from, and how many there are, if these differ."""
    count = 0 if loss is None else loss.count
    return str(count) if count == len(row.runs) else f"{count} of {len(row.runs)}"


def _fact(row: Row, name: str) -> str:
    values = {value for run in row.runs if (value := run.number(name)) is not None}
    return ", ".join(count_text(value) for value in sorted(values)) or DASH
