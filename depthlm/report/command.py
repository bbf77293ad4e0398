"""`python -m depthlm report`: writes report.md and its figures, and prints the main table."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from depthlm.config.resolve import run_name
from depthlm.console import stdout_console
from depthlm.errors import UserError
from depthlm.files import replace_text
from depthlm.report.experiment_report import experiment_report
from depthlm.report.head import state_line, warnings
from depthlm.report.runs_report import NO_DIFFERENCE, find_runs, runs_report
from depthlm.report.sweep import read_sweep
from depthlm.report.tables import Table, show
from depthlm.report.upload import upload
from depthlm.runs.records import RunRecord
from depthlm.streams import printable

USAGE = (
    "give experiment=<paper>/<name> with overrides as for train.py -m, or runs=<run directories, separated by commas>; "
    "to=<folder> sets the folder of the report, and wandb=<project> uploads it to Weights & Biases"
)

RUNS_REPORT = "outputs/report"


def report(arguments: Sequence[str], config_dir: str | Path | None = None) -> Path:
    """Write the report for `experiment=...` or `runs=...`, print its main tables, and return the path of report.md.

    Raises UserError for arguments that name no experiment or run, or where the report cannot be written.
    """
    to, runs, project = _last(arguments, "to"), _last(arguments, "runs"), _last(arguments, "wandb")
    overrides = [text for text in arguments if not text.startswith(("to=", "runs=", "wandb="))]
    if project is not None and not re.fullmatch(r"([^/]+/)?[^/]+", project):
        raise UserError(f"wandb={project}: must be <project> or <team>/<project>")
    if runs is not None and overrides:
        raise UserError(f"{' '.join(overrides)}: runs= takes no settings, since its runs have their own; {USAGE}")
    if runs is None and not any(text.startswith(("experiment=", "+experiment=")) for text in overrides):
        raise UserError(USAGE)
    if runs is not None:
        return report_runs(find_runs(runs.split(",")), to or RUNS_REPORT, project=project)
    sweep = read_sweep(overrides, config_dir)
    # reports with other overrides (budget, size, seed) have other folders
    named = run_name(overrides).replace("base", "")
    folder = Path(to or "-".join(filter(None, [f"outputs/{sweep.experiment.name}/report", named])))
    path, tables = _write(folder, lambda: experiment_report(sweep, folder))
    _show(path, tables, state_line(sweep.runs), warnings(sweep))
    if project is not None:
        _print(f"W&B: {upload(path, tables, project)}")
    return path


def report_runs(runs: Sequence[RunRecord], to: str | Path, option: str = "to=", project: str | None = None) -> Path:
    """Write the report of these runs to a folder, print their results and the settings in which they differ.

    option: where the user gave the folder, for messages. project: of W&B, to which it is uploaded. Returns the path of
    report.md. Raises UserError if it cannot be written or uploaded.
    """
    folder = Path(to)
    path, tables = _write(folder, lambda: runs_report(runs, folder), option)
    # the first table has the results
    notes = [] if len(tables) > 1 or len(runs) == 1 else [f"{NO_DIFFERENCE}."]
    _show(path, tables, state_line(list(runs)), notes)
    if project is not None:
        _print(f"W&B: {upload(path, tables, project)}")
    return path


def _write(folder: Path, write: Callable[[], tuple[str, list[Table]]], option: str = "to=") -> tuple[Path, list[Table]]:
    """Write a report to a folder; return its path, and its tables for the terminal. Raises UserError."""
    path = folder / "report.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text, tables = write()
        replace_text(path, printable(text))
    except OSError as error:
        raise UserError(f"{option}{folder}: the report cannot be written there ({error.strerror or error})") from None
    return path, tables


def _last(arguments: Sequence[str], name: str) -> str | None:
    values = [text.partition("=")[2] for text in arguments if text.startswith(f"{name}=")]
    return values[-1] if values else None


def _print(line: str) -> None:
    stdout_console().print(line, markup=False, soft_wrap=True)


def _show(path: Path, tables: Sequence[Table], state: str, notes: Sequence[str]) -> None:
    console = stdout_console()
    if not console.is_terminal:
        # no line wrapping in a file
        console.width = 240
    for table in tables:
        show(table, console)
    for line in (*notes, f"{state}.", f"report: {path}"):
        console.print(line, markup=False, soft_wrap=True)
    pictures = ", ".join(sorted(file.name for file in path.parent.glob("*.png")))
    if pictures:
        console.print(f"figures in the same folder: {pictures}", markup=False, soft_wrap=True)
