"""The table of a sweep: the state, progress and losses of each point."""

from collections.abc import Mapping, Sequence

from rich.markup import escape

from depthlm.console import stdout_console
from depthlm.runs.progress import failure_text, progress_of, progress_table, total_hours
from depthlm.runs.records import COMPLETE, FAILED, RUNNING, STOPPED, WAITING, read_run
from depthlm.sweeps.best import find_undecided, undecided_text
from depthlm.sweeps.point import Point

# of the states of a run, for rich
STYLES = {WAITING: "dim", RUNNING: "cyan", STOPPED: "yellow", FAILED: "red", COMPLETE: "green"}


def print_points(points: Sequence[Point], known: Mapping[str, tuple[str, str]] | None = None) -> None:
    """Print one line per point: its state, progress and losses, and the reason of a failure.

    known: states of run directories that override what their files say, for example from a scheduler, each with what
    to add to the line, such as why a job waits.
    """
    common = set.intersection(*(set(point.overrides) for point in points)) if len(points) > 1 else set()
    rows, states, progress = [], [], []
    for number, point in enumerate(points):
        run = read_run(point.directory)
        state, note = (known or {}).get(point.directory, (run.state, ""))
        states.append(state)
        progress.append(progress_of(run))
        name = point.label or " ".join(text for text in point.overrides if text not in common)
        loss, validation = run.loss, run.number("validation_loss")
        note = note or (failure_text(run.failure) if state == FAILED else "")
        seed = f"{'selection ' * point.selects}seed {point.seed}"
        rows.append(
            {
                "": str(number),
                "point": escape(f"{name} ({seed})" if point.seed is not None and point.label else name),
                "state": f"[{STYLES[state]}]{state}[/]" if state in STYLES else state,
                **progress[-1].texts(),
                "loss": "" if loss is None else f"{loss:.4f}",
                "validation": "" if validation is None else f"{validation:.4f}",
                "reason": escape(note),
            }
        )
    console = stdout_console()
    console.print(progress_table(rows))
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    console.print(f"{len(points)} points: {counts}{total_hours(progress)}")
    if groups := find_undecided(points):
        console.print(undecided_text(groups), markup=False, highlight=False, soft_wrap=True)
