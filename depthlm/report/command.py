"""`python -m depthlm report`: from its words to report.md, pictures, and a table on the terminal."""

from collections.abc import Sequence
from pathlib import Path

from depthlm.config.resolve import run_name
from depthlm.console import stdout_console
from depthlm.errors import UserError
from depthlm.files import replace_text
from depthlm.report.experiment_report import experiment_report
from depthlm.report.head import state_line, warnings
from depthlm.report.runs_report import find_runs, runs_report
from depthlm.report.sweep import read_sweep
from depthlm.report.tables import Table, show

USAGE = (
    "give experiment=<paper>/<name> with overrides as for train.py -m, or runs=<run directories, separated by commas>; "
    "to=<folder> says where the report goes"
)


def report(given: Sequence[str], config_dir: str | Path | None = None) -> Path:
    """Write the report that `experiment=...` or `runs=...` asks for, and show its main table; the path of report.md.

    Raises UserError for what names no experiment or run, or where the report cannot be written.
    """
    to, runs = _last(given, "to"), _last(given, "runs")
    overrides = [text for text in given if not text.startswith(("to=", "runs="))]
    if runs is not None and overrides:
        raise UserError(f"{' '.join(overrides)}: runs= takes no settings, its runs have theirs; {USAGE}")
    if runs is None and not any(text.startswith(("experiment=", "+experiment=")) for text in overrides):
        raise UserError(USAGE)
    if runs is not None:
        records = find_runs(runs)
        folder = Path(to or "outputs/report")
        state, told = state_line(records), []
    else:
        sweep = read_sweep(overrides, config_dir)
        # those of other budgets, sizes, seeds stay beside it
        named = run_name(overrides).replace("base", "")
        folder = Path(to or "-".join(filter(None, [f"outputs/{sweep.experiment.name}/report", named])))
        state, told = state_line(sweep.runs), warnings(sweep)
    path = folder / "report.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text, tables = runs_report(records, folder) if runs is not None else experiment_report(sweep, folder)
        replace_text(path, text)
    except OSError as error:
        raise UserError(f"to={folder}: the report cannot be written there ({error.strerror or error})") from None
    _show(path, tables, state, told)
    return path


def _last(given: Sequence[str], name: str) -> str | None:
    values = [text.partition("=")[2] for text in given if text.startswith(f"{name}=")]
    return values[-1] if values else None


def _show(path: Path, tables: Sequence[Table], state: str, told: Sequence[str]) -> None:
    console = stdout_console()
    if not console.is_terminal:
        # in a file nothing wraps
        console.width = 240
    for table in tables:
        show(table, console)
    for line in (*told, f"{state}.", f"report: {path}"):
        console.print(line, markup=False, soft_wrap=True)
    pictures = ", ".join(sorted(file.name for file in path.parent.glob("*.png")))
    if pictures:
        console.print(f"pictures beside it: {pictures}", markup=False, soft_wrap=True)
