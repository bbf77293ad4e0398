"""How far a run is, how fast it trains, and what is left of it; and a table of that for several runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from depthlm.config.keys import flatten
from depthlm.counts import count_text, duration_text, format_count
from depthlm.files import read_json, read_yaml
from depthlm.run_directory import RunDirectory
from depthlm.runs.records import COMPLETE, RunRecord, finite

# the newest rows of metrics.jsonl whose mean speed the rest of a run is estimated from
RECENT_ROWS = 10
# characters of the reason of a failure in a table
LONGEST_REASON = 80


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run; None stands for what its files do not say.

    steps: of the whole run. tokens_per_second: of the newest rows; of all steps in a complete run. remaining_seconds:
    of training. gpu_hours, remaining_gpu_hours: training time of all GPUs, without validation and saving; None on a
    CPU.
    """

    step: int | None
    steps: int | None
    tokens_per_second: float | None
    remaining_seconds: float | None
    gpu_hours: float | None
    remaining_gpu_hours: float | None

    def texts(self) -> dict[str, str]:
        """Return the columns of a table; a value that is not known is empty."""
        total = "" if self.steps is None else f" / {self.steps:,}"
        return {
            "step": "" if self.step is None else f"{self.step:,}{total}",
            "tokens/s": "" if self.tokens_per_second is None else count_text(round(self.tokens_per_second)),
            "left": "" if not self.remaining_seconds else duration_text(self.remaining_seconds),
            "GPU hours": hours_text(self.gpu_hours),
            "to come": hours_text(self.remaining_gpu_hours) if self.remaining_gpu_hours else "",
        }


def progress_of(run: RunRecord) -> RunProgress:
    """Return the progress of a run, from its rows, its summary, and environment.json."""
    environment = read_json(RunDirectory(run.directory).environment)
    steps, devices = environment.get("steps"), environment.get("world_size")
    if type(steps) is not int:
        # that of version 0.2 has no steps
        steps = flatten(read_yaml(RunDirectory(run.directory).config)).get("training.max_steps")
    rows = _timed_rows(run.rows)
    recent = rows[-RECENT_ROWS:]
    seconds = sum(row.seconds for row in recent)
    speed = sum(row.tokens for row in recent) / seconds if recent else None
    step, remaining = run.step, None
    if run.state == COMPLETE:
        step = steps = run.summary.get("steps")
        speed, remaining = finite(run.summary.get("tokens_per_second")), 0.0
    elif speed and step and type(steps) is int:
        tokens_per_step = sum(row.tokens for row in rows) / sum(row.steps for row in rows)
        remaining = (steps - step) * tokens_per_step / speed
    gpus = devices if environment.get("device_type") == "cuda" and type(devices) is int else None
    trained = sum(row.seconds * (row.ranks or gpus or 0) for row in rows)
    if not rows:
        trained = (finite(run.summary.get("wall_seconds")) or 0.0) * (gpus or 0)
    return RunProgress(
        step=step if type(step) is int else None,
        steps=steps if type(steps) is int else None,
        tokens_per_second=speed,
        remaining_seconds=remaining,
        gpu_hours=None if gpus is None else trained / 3600,
        remaining_gpu_hours=None if gpus is None or remaining is None else gpus * remaining / 3600,
    )


def progress_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Return a table of runs; a column that is empty in all rows is left out, as are GPU hours on a CPU."""
    names = [name for name in (rows[0] if rows else {}) if any(row[name] for row in rows)]
    table = Table(*names, box=box.SIMPLE)
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def failure_text(failure: str | None, longest: int = LONGEST_REASON) -> str:
    """Return the first line of an error, of at most so many characters."""
    line = (failure or "").strip().partition("\n")[0]
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def total_hours(progress: Sequence[RunProgress]) -> str:
    """Describe the GPU hours of all points; empty if none trains on a GPU."""
    spent = [run.gpu_hours for run in progress if run.gpu_hours is not None]
    if not spent:
        return ""
    remaining = [run.remaining_gpu_hours for run in progress if run.remaining_gpu_hours is not None]
    unknown = len(progress) - len(remaining)
    without = f", without {format_count(unknown, 'point')} whose speed is not known" if unknown else ""
    return f"; {hours_text(sum(spent))} GPU hours so far, {hours_text(sum(remaining))} to come{without}"


def hours_text(hours: float | None) -> str:
    """Format GPU hours: 0.0123 as `0.012`, 12.34 as `12.3`, 1234.5 as `1,234`, and what is less than 0.01 as that."""
    if hours is None:
        return ""
    if 0 < hours < 0.01:
        return "< 0.01"
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 10 else f"{hours:.2g}"


def mean_mfu(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the mean MFU of the steps of a run's own rows of metrics; None if its peak FLOP/s are not known."""
    known = [(row.tokens, row.mfu) for row in _timed_rows(rows) if row.mfu]
    return sum(tokens for tokens, _ in known) / sum(tokens / mfu for tokens, mfu in known) if known else None


class _TimedRow(NamedTuple):
    """The steps, the tokens and the training time between a row of metrics and the row before it.

    ranks: that trained them; None in rows of earlier versions. mfu: of each rank.
    """

    steps: int
    tokens: float
    seconds: float
    ranks: int | None
    mfu: float | None


def _timed_rows(metrics: Iterable[Mapping[str, Any]]) -> list[_TimedRow]:
    rows: list[_TimedRow] = []
    step, before = 0, 0.0
    for row in metrics:
        tokens, speed = finite(row.get("tokens")), finite(row.get("tokens_per_second"))
        updates = row.get("interval_updates")
        if not rows and type(updates) is int and tokens and 0 < updates < row["step"]:
            # a fork has no rows of the steps before it
            step = row["step"] - updates
            before = tokens * step / row["step"]
        if row["step"] > step and tokens and speed and tokens > before and speed > 0:
            ranks = row.get("world_size")
            timed = _TimedRow(
                steps=row["step"] - step,
                tokens=tokens - before,
                seconds=(tokens - before) / speed,
                ranks=ranks if type(ranks) is int else None,
                mfu=finite(row.get("mfu")),
            )
            rows.append(timed)
            step, before = row["step"], tokens
    return rows
