"""A report on Weights & Biases: its tables, figures and files as one run, which a later upload of it updates."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from depthlm.config.schema import Tracker
from depthlm.errors import UserError
from depthlm.report.tables import DASH, MISSING, Cell, Table
from depthlm.runs.weights_and_biases import init as init_wandb


def upload(path: Path, tables: Sequence[Table], project: str) -> str:
    """Upload report.md, its tables and its figures to a W&B project, or write them offline without a key.

    project: `project` or `team/project`. Returns where they are now. Raises UserError if W&B fails.
    """
    import wandb

    folder = path.parent
    entity, _, name = project.rpartition("/")
    # one run per folder of a report, so that W&B shows a report as it is now, and its earlier states as steps
    identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    run = init_wandb(
        Tracker(project=name), entity=entity or None, job_type="report", name=str(folder), id=identity, dir=folder
    )
    if run is None:
        raise UserError(f"wandb={project}: W&B did not start (see the warnings above); the report is in {folder}")
    try:
        figures = {file.stem: wandb.Image(str(file)) for file in sorted(folder.glob("*.png"))}
        run.log({**named(tables), **figures})
        artifact = wandb.Artifact(f"report-{identity}", type="report")
        for file in (path, *sorted(folder.glob("*.png"))):
            artifact.add_file(str(file))
        run.log_artifact(artifact)
        run.finish()
    except Exception as error:
        raise UserError(f"wandb={project}: W&B failed ({error}); the report itself is in {folder}") from None
    return f"offline in {folder / 'wandb'}; `wandb sync` uploads it" if run.offline else str(run.url)


def named(tables: Sequence[Table]) -> dict[str, Any]:
    """Return the tables of W&B by name. Of those without a title, the first has the results, the others settings."""
    untitled = iter(["results", "settings", *(f"settings {number}" for number in range(2, len(tables)))])
    return {table.title or next(untitled): wandb_table(table) for table in tables}


def wandb_table(table: Table) -> Any:
    """Return a table as W&B's: numbers as numbers, so that it can be sorted and plotted there."""
    import wandb

    rows = [
        [cell.text if table.words or not column else _value(cell) for column, cell in enumerate(row)]
        for row in table.rows
    ]
    return wandb.Table(columns=table.head, data=rows, allow_mixed_types=True)


def _value(cell: Cell) -> float | str | None:
    if cell.text in (DASH, MISSING):
        return None
    try:
        return float(cell.text.replace(",", ""))
    except ValueError:
        return cell.text
