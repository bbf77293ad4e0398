"""The report of a sweep without an experiment: a row per setting, over its seeds, sorted by the validation loss."""

from collections.abc import Sequence
from pathlib import Path

from depthlm.config.names import setting_text
from depthlm.counts import count_text
from depthlm.report.choice import choice_parts, choice_state, choice_tables, setting_of
from depthlm.report.comparison import difference_text
from depthlm.report.equal_cost import cost_parts
from depthlm.report.experiment_report import picture, protocol_parts, result_notes, runs_table, state_line, warnings
from depthlm.report.figures.loss_curves import draw_loss_curves, panels_of
from depthlm.report.rows import Measured, Row, number
from depthlm.report.sweep import Difference, Sweep
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
    parts = ["# Runs", *(f"**{warning}**" for warning in warnings(sweep)), f"{state_line(sweep.runs)}."]
    parts += [
        *choice_state(sweep),
        *result_notes(sweep),
        *notes,
        markdown(results),
        LEGEND.format(luck=sweep.luck_text),
    ]
    parts += [*choice_parts(sweep, folder), *cost_parts(sweep, folder)]
    parts += [markdown(table) for table in settings]
    name = "loss_curves.png"
    drawn = draw_loss_curves(panels_of(sweep), folder / name, sweep.stamp(), sweep.experiment.title)
    parts.append(picture("Loss curves", folder, name, drawn))
    every_run = runs_table(sweep)
    parts.append(markdown(every_run))
    parts += protocol_parts(sweep)
    # of incomplete runs, the terminal shows how far they are
    is_complete = all(run.state == COMPLETE for run in sweep.runs)
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
        references = {entry.reference.label for entry in differences.values() if entry.reference is not None}
        baseline = setting_text(sweep.experiment.series, sweep.experiment.baseline)
        head.append(f"against {references.pop() if len(references) == 1 else baseline}")
    table = []
    for row in sorted(sweep.rows, key=lambda row: _rank(losses[row.label])):
        label, loss = row.label, losses[row.label]
        shown = Cell(MISSING if loss is None else _loss_text(loss, column.digits), label in best)
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
    row, reference = (
        {
            name: value
            for name, value in settings.items()
            if name not in (sweep.experiment.series, setting_of(sweep)) and not name.startswith("model")
        }
        for settings in (entry.row.settings, entry.reference.settings)
    )
    return row == reference


def _rank(loss: Measured | None) -> tuple[bool, float]:
    return loss is None, 0.0 if loss is None else loss.mean


def _seeds(row: Row, loss: Measured | None) -> str:
    """Return how many seeds the loss is from, and how many there are, if these differ."""
    count = 0 if loss is None else loss.count
    return str(count) if count == len(row.runs) else f"{count} of {len(row.runs)}"


def _loss_text(loss: Measured, digits: int) -> str:
    mean = number_text(loss.mean, digits)
    if loss.interval is None:
        return mean
    low, high = (number_text(loss.mean + side * loss.interval, digits) for side in (-1, 1))
    return f"{mean} [{low}, {high}]"


def _fact(row: Row, name: str) -> str:
    values = {value for run in row.runs if (value := number(run, name)) is not None}
    return ", ".join(count_text(value) for value in sorted(values)) or DASH
