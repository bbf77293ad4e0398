"""`python -m depthlm report`: writes report.md and its figures, and prints the main table."""

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from depthlm.config.names import report_name
from depthlm.console import stdout_console
from depthlm.errors import UserError
from depthlm.files import replace_text
from depthlm.locations import command
from depthlm.report.choice import choice_tables
from depthlm.report.comparison import comparison_tables
from depthlm.report.experiment_report import experiment_report, state_line, warnings, with_available_metric
from depthlm.report.runs_report import NO_DIFFERENCE, REPORT, SETTINGS, find_runs, holds_run, runs_report
from depthlm.report.sweep import read_sweep, with_baseline
from depthlm.report.sweep_report import results_table, sweep_report
from depthlm.report.tables import Table, show
from depthlm.runs.records import WAITING, RunRecord
from depthlm.streams import printable
from depthlm.sweeps.best import undecided_text

USAGE = (
    "give the overrides of train.py -m, with experiment=<paper>/<name> or without, or folders of runs; "
    "baseline=<row or setting> sets what the others are compared with, and to=<folder> the folder of the report"
)
OPTIONS = ("to=", "baseline=")
REPORT_COMMAND = command("-m depthlm report", "report")


def report(arguments: Sequence[str], config_dir: str | Path | None = None) -> Path:
    """Write the report on a sweep or on a folder of runs, print its main tables, and return the path of report.md.

    Raises UserError for arguments that name no sweep or run, or where the report cannot be written.
    """
    options = dict(text.split("=", 1) for text in arguments if text.startswith(OPTIONS))
    overrides = [text for text in arguments if not text.startswith(OPTIONS)]
    to, baseline = options.get("to"), options.get("baseline")
    folders = [text for text in overrides if os.path.isdir(text) or ("=" not in text and not text.startswith("~"))]
    if folders:
        settings = [text for text in overrides if text not in folders]
        if settings:
            raise UserError(f"{' '.join(settings)}: not with a folder of runs, which have their own settings; {USAGE}")
        is_inside = len(folders) == 1 and not holds_run(Path(folders[0]))
        folder = Path(folders[0] if is_inside else "outputs") / report_name([], baseline)
        return _report_runs(find_runs(folders), Path(to or folder), baseline)
    if not overrides:
        raise UserError(USAGE)
    return _report_sweep(overrides, config_dir, to, baseline)


def _report_sweep(
    overrides: Sequence[str],
    config_dir: str | Path | None,
    to: str | None,
    baseline: str | None,
) -> Path:
    sweep = with_baseline(read_sweep(overrides, config_dir), baseline)
    # reports on other overrides (budget, size, seed) or with another baseline have other folders
    folder = Path(to or f"outputs/{sweep.experiment.name or 'default'}/{report_name(overrides, baseline)}")
    if sweep.experiment.name:
        path, tables = _write(folder, lambda: experiment_report(sweep, folder))
    else:
        path, tables = _write(folder, lambda: sweep_report(sweep, folder))
    waiting = [f"{undecided_text(sweep.undecided)}."] if sweep.undecided else []
    _show(tables, [*warnings(sweep), f"{state_line(sweep.every_run)}.", *waiting, *_places(path)])
    if all(run.state == WAITING for run in sweep.every_run):
        flags = [] if config_dir is None else [f"--config-dir={config_dir}"]
        print(f"No run has begun. To train them: {command('train.py', 'train')} -m {shlex.join([*overrides, *flags])}")
    return path


def _report_runs(runs: Sequence[RunRecord], folder: Path, baseline: str | None) -> Path:
    path, tables = _write(folder, lambda: runs_report(runs, folder, baseline))
    differ = any(table.title == SETTINGS for table in tables)
    notes = [f"{NO_DIFFERENCE}."] if len(runs) > 1 and not differ else []
    _show(tables, [*notes, f"{state_line(runs)}.", *_places(path)])
    return path


def show_results(overrides: Sequence[str], config_dir: str | Path | None = None) -> None:
    """Print the table of a sweep's results, and the command that writes its whole report."""
    sweep = read_sweep(overrides, config_dir)
    if sweep.experiment.name:
        tables = next(iter(comparison_tables(with_available_metric(sweep)).values()))
    else:
        tables = [results_table(sweep)]
    texts = [*overrides, *([f"--config-dir={config_dir}"] if config_dir is not None else [])]
    _show([*tables, *choice_tables(sweep)], [*warnings(sweep), f"{REPORT_COMMAND} {shlex.join(texts)}"])


def _write(folder: Path, write: Callable[[], tuple[str, list[Table]]]) -> tuple[Path, list[Table]]:
    """Write a report to a folder; return its path, and its tables for the terminal. Raises UserError."""
    path = folder / REPORT
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text, tables = write()
        replace_text(path, printable(text))
    except OSError as error:
        raise UserError(f"to={folder}: the report cannot be written there ({error.strerror or error})") from None
    return path, tables


def _places(path: Path) -> list[str]:
    """Return lines that say where a report and its figures are."""
    pictures = ", ".join(sorted(file.name for file in path.parent.glob("*.png")))
    return [f"report: {path}", *([f"figures in the same folder: {pictures}"] if pictures else [])]


def _show(tables: Sequence[Table], lines: Sequence[str]) -> None:
    """Print tables, and lines of text below them."""
    console = stdout_console()
    for table in tables:
        show(table, console)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
