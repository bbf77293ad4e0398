"""The report of an experiment: tables and figures of our results next to the paper's."""

from collections.abc import Callable, Sequence
from pathlib import Path

from depthlm.report.comparison import against_table, comparison_tables
from depthlm.report.figures.bars import draw_bars
from depthlm.report.figures.heatmap import draw_heatmap
from depthlm.report.figures.lines import draw_lines
from depthlm.report.figures.loss_curves import draw_loss_curves
from depthlm.report.figures.panels import panels_of
from depthlm.report.figures.scaling import draw_scaling
from depthlm.report.figures.stamp import stamp_of
from depthlm.report.head import head
from depthlm.report.scaling_laws import curves, fit_table, remarks, savings, savings_table
from depthlm.report.sweep import Sweep
from depthlm.report.tables import DASH, MISSING, Table, markdown, plain

LEGEND = (
    f"{DASH}: the paper prints no number, or a complete run has none. {MISSING}: no run is complete. Bold: the best of "
    "ours. Points that differ only in the seed form one row: mean ± sample standard deviation."
)
FIGURES: dict[str, Callable[[Sweep, Path], list[str] | None]] = {
    "bars": draw_bars,
    "lines": draw_lines,
    "heatmap": draw_heatmap,
}


def experiment_report(sweep: Sweep, folder: Path) -> tuple[str, list[Table]]:
    """Draw the figures into a folder; return the Markdown report and the tables of its first group. Raises OSError."""
    groups = comparison_tables(sweep)
    parts = [head(sweep), "## Results"]
    parts += [markdown(table) for tables in groups.values() for table in tables]
    parts.append(LEGEND)
    against = against_table(sweep)
    if against is not None:
        parts.append(markdown(against))
        if any("[" in cell.text for row in against.rows for cell in row[1:]):
            parts.append(
                "In brackets: the 95% interval over seeds, by Student's t, of the differences between runs with the "
                "same seed; their variance is pooled over the rows of a series."
            )
    if sweep.experiment.figure == "scaling":
        parts.append(_scaling(sweep, folder))
    elif sweep.experiment.figure != "none":
        name = f"{sweep.experiment.figure}.png"
        notes = FIGURES[sweep.experiment.figure](sweep, folder / name)
        parts.append(picture("Figure", folder, name, notes))
    name = "loss_curves.png"
    drawn = draw_loss_curves(panels_of(sweep), folder / name, stamp_of(sweep))
    parts.append(picture("Loss curves", folder, name, drawn))
    return "\n\n".join(parts) + "\n", next(iter(groups.values()))


def _scaling(sweep: Sweep, folder: Path) -> str:
    fitted = curves(sweep)
    saved = savings(sweep, fitted)
    name = "scaling.png"
    parts = [picture("Scaling", folder, name, draw_scaling(sweep, fitted, saved, folder / name))]
    parts.append(markdown(fit_table(sweep, fitted)))
    if (table := savings_table(sweep, fitted, saved)) is not None:
        parts.append(markdown(table))
    parts += [plain(line) for line in remarks(sweep, fitted, saved)]
    return "\n\n".join(parts)


def picture(title: str, folder: Path, name: str, notes: Sequence[str] | None) -> str:
    """Return a section with a figure and its notes; notes is None where there was nothing to draw."""
    if notes is None:
        # the figure of an earlier report must not be shown in this one
        (folder / name).unlink(missing_ok=True)
        return f"## {title}\n\nNothing to draw yet."
    return "\n\n".join([f"## {title}", f"![{title}]({name})", *([plain(" ".join(notes))] if notes else [])])
