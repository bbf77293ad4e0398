"""`depthlm runs [filter ...]`: list the run directories and the progress of each run."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from depthlm.console import stdout_console
from depthlm.counts import count_text
from depthlm.errors import UserError
from depthlm.files import read_yaml
from depthlm.run_directory import RunDirectory
from depthlm.runs.records import read_run
from depthlm.runs.validation_losses import finite
from depthlm.sweeps.table import STYLES

# folders whose config.yaml files do not belong to runs: code snapshots, and the files of W&B
IGNORED = {".slurm", "wandb"}


@dataclass(frozen=True)
class Listed:
    """An entry of the list. loss: the last logged training loss. age: seconds since the last write to the directory."""

    directory: str
    state: str
    model: str
    size: str
    step: int | None
    tokens: int | None
    loss: float | None
    validation_loss: float | None
    age: float


def main(arguments: list[str], program: str) -> None:
    """List the runs that match every filter, newest last."""
    parser = argparse.ArgumentParser(
        prog=program, description="List run directories: state, model, size, tokens, losses, age."
    )
    parser.add_argument(
        "filter",
        nargs="*",
        help="part of the directory; or a state, model or size; or a pattern for one of these: mhc, failed, "
        "'outputs/sweep/*'; a run must match every filter",
    )
    parser.add_argument("--root", default="outputs", help="folder that contains the runs (default outputs)")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parsed = parser.parse_args(arguments)
    if not Path(parsed.root).is_dir():
        raise UserError(f"--root {parsed.root}: no such folder; give the folder that contains the runs")
    runs = list_runs(Path(parsed.root), parsed.filter)
    if parsed.json:
        print(json.dumps([asdict(run) for run in runs], indent=1))
        return
    table = Table("run", "state", "model", "size", "tokens", "loss", "validation", "age", box=box.SIMPLE)
    for run in runs:
        table.add_row(*_cells(run))
    console = stdout_console()
    console.print(table)
    console.print(f"{len(runs)} run{'' if len(runs) == 1 else 's'} below {escape(parsed.root)}")


def list_runs(root: Path, filters: Sequence[str] = ()) -> list[Listed]:
    """Return the runs below a folder that match all filters, sorted by their last change."""
    configs = root.rglob(RunDirectory(root).config.name)
    folders = sorted({file.parent for file in configs if IGNORED.isdisjoint(file.relative_to(root).parts)})
    runs = [_listed(folder) for folder in folders]
    return sorted((run for run in runs if all(_matches(run, text) for text in filters)), key=lambda run: -run.age)


def _matches(run: Listed, text: str) -> bool:
    words = (run.directory, run.state, run.model, run.size)
    return text in run.directory or any(text == word or fnmatch(word, text) for word in words)


def _listed(folder: Path) -> Listed:
    paths = RunDirectory(folder)
    run, config = read_run(folder), read_yaml(paths.config)
    newest = max(file.stat().st_mtime for file in (paths.config, paths.metrics, paths.summary) if file.exists())
    last = run.rows[-1] if run.rows else {}
    tokens = finite(run.summary.get("tokens", last.get("tokens")))
    return Listed(
        directory=str(folder),
        state=run.state,
        model=_name(config, "model"),
        size=_name(config, "size"),
        step=run.step,
        tokens=None if tokens is None else int(tokens),
        loss=run.loss,
        validation_loss=run.number("validation_loss"),
        age=max(0.0, time.time() - newest),
    )


def _name(config: dict[str, Any], group: str) -> str:
    part = config.get(group)
    return str(part.get("name", "?")) if isinstance(part, dict) else "?"


def _cells(run: Listed) -> list[str]:
    return [
        escape(run.directory),
        f"[{STYLES[run.state]}]{run.state}[/]",
        escape(run.model),
        escape(run.size),
        "" if run.tokens is None else count_text(run.tokens),
        "" if run.loss is None else f"{run.loss:.4f}",
        "" if run.validation_loss is None else f"{run.validation_loss:.4f}",
        age_text(run.age),
    ]


def age_text(seconds: float) -> str:
    """Return an age as text: 90 gives `1 min`, 10 000 gives `2 h`, 400 000 gives `4 days`."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size or (unit != "days" and seconds >= size):
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"
