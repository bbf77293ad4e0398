"""A table of the points of a sweep, with the progress of each run."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from depthlm.console import stdout_console
from depthlm.runs.records import COMPLETE, FAILED, RUNNING, STOPPED, WAITING, RunRecord, read_run
from depthlm.sweeps.points import Point

STYLES = {WAITING: "dim", RUNNING: "cyan", STOPPED: "yellow", FAILED: "red", COMPLETE: "green"}


def print_points(points: Sequence[Point], known: Mapping[str, str] | None = None) -> None:
    """Print one line per point: its state, newest step and losses, and the reason of a failure.

    known: states of run directories that override what their files say, for example from a scheduler.
    """
    console = stdout_console()
    common = set.intersection(*(set(point.overrides) for point in points)) if len(points) > 1 else set()
    table = Table("", "point", "state", "step", "loss", "validation", "", box=box.SIMPLE)
    states = []
    for number, point in enumerate(points):
        run = read_run(point.directory)
        state = (known or {}).get(point.directory, run.state)
        states.append(state)
        overrides = " ".join(text for text in point.overrides if text not in common)
        table.add_row(str(number), *_cells(point, overrides, run, state))
    console.print(table)
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    console.print(f"{len(points)} points: {counts}")


def _cells(point: Point, overrides: str, run: RunRecord, state: str) -> list[str]:
    name = point.label or overrides
    loss, validation = run.loss, run.number("validation_loss")
    return [
        f"{name} (seed {point.seed})" if point.seed is not None and point.label else name,
        f"[{STYLES.get(state, '')}]{state}[/]" if state in STYLES else state,
        "" if run.step is None else f"{run.step:,}",
        "" if loss is None else f"{loss:.4f}",
        "" if validation is None else f"{validation:.4f}",
        (run.failure or "").partition("\n")[0][:60] if state == FAILED else "",
    ]
