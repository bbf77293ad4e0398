"""Console output of a run: log lines, tables, and the progress bar."""

import logging
import sys
from collections.abc import Callable, Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.highlighter import RegexHighlighter
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from depthlm.console import stdout_console
from depthlm.counts import count_text, duration_text
from depthlm.files import check_regular
from depthlm.runs.records import ValidationLosses, perplexity
from depthlm.streams import printable, report_dropped_output

log = logging.getLogger("depthlm")
console = stdout_console()
# the weight of all earlier steps in the exponential means: the loss over about 50 steps, the time over about 10
LOSS_DECAY, TIME_DECAY = 0.98, 0.9
# the colour of losses and of the bar; nothing else has one
ACCENT = "cyan"
# the share of an interval above which waiting for data slows a run down
SLOW_DATA = 0.05


class LossHighlighter(RegexHighlighter):
    """Gives the losses of log lines the accent colour."""

    highlights = (rf"\bloss (?P<{ACCENT}>\d\S*)",)


def start_logging(rank: int) -> None:
    """Log to the console, and keep the lines for train.log; ranks other than 0 log only warnings and errors."""
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.propagate = False
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    if console.is_terminal:
        console.push_theme(Theme({"log.time": "dim"}))
        screen: logging.Handler = RichHandler(
            console=console, show_path=False, show_level=False, log_time_format="%X", highlighter=LossHighlighter()
        )
    else:
        screen = logging.StreamHandler(sys.stdout)
        screen.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    log.addHandler(screen)
    if rank == 0:
        log.addHandler(MemoryHandler(1000, flushLevel=logging.CRITICAL + 1, flushOnClose=False))
    # a message may quote a file of somebody else
    log.addFilter(plain_message)
    report_dropped_output()


def plain_message(record: logging.LogRecord) -> bool:
    """Escape the control characters of a message. Returns true, as a filter of a logger that keeps it."""
    record.msg, record.args = printable(record.getMessage()), ()
    return True


def log_to(file: Path) -> None:
    """Log to a file as well, beginning with the lines logged before it was opened. Raises OSError."""
    check_regular(file)
    to_file = logging.FileHandler(file)
    to_file.setFormatter(logging.Formatter("%(asctime)s  %(message)s"))
    # on a full disk, lines are lost without an error or a traceback
    to_file.handleError = lambda record: None  # type: ignore[method-assign]
    for handler in [handler for handler in log.handlers if isinstance(handler, MemoryHandler)]:
        handler.setTarget(to_file)
        handler.flush()
        log.removeHandler(handler)
    log.addHandler(to_file)


def show_table(title: str, rows: dict[str, str], rank: int) -> None:
    """Print names and values as a table on rank 0, and write them to the log file."""
    if rank != 0:
        return
    table = Table(title=title, box=box.SIMPLE, show_header=False, title_justify="left", title_style="bold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    for handler in log.handlers:
        if isinstance(handler, logging.FileHandler):
            for name, value in rows.items():
                handler.emit(log.makeRecord(log.name, logging.INFO, "", 0, "%s: %s", (name, value), None))


def number_text(value: float | None) -> str:
    """Format a number with four decimals, or a tiny one as 1.2e-05; None stands for a non-finite number."""
    if value is None:
        return "not finite"
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def validation_lines(losses: ValidationLosses, diagnostics: dict[str, float | None]) -> list[str]:
    """Format the results of a validation: a line for each set, with the perplexity, and one for the diagnostics."""
    lines = [
        f"validation/{name} loss {number_text(loss)} (perplexity {number_text(perplexity(loss))})"
        for name, loss in losses.by_set.items()
    ]
    values = "  ".join(f"{name} {number_text(value)}" for name, value in diagnostics.items())
    return [*lines, values] if values else lines


def row_text(row: dict[str, Any], last: int, steps: int, seconds: float) -> str:
    """Format a row of metrics as one line. last: the run's last step.

    steps, seconds: the steps since the previous row, and the time that they took.
    """
    remaining, waiting = (last - row["step"]) * seconds / steps, row["data_seconds"] / seconds
    parts = [
        f"step {row['step']}/{last}",
        f"mean loss {'none: no update' if row['mean_loss'] is None else number_text(row['mean_loss'])}",
        f"lr {row['learning_rate']:.2e}",
        "skipped" if row["grad_norm"] is None else f"grad norm {row['grad_norm']:.3g}",
        f"{count_text(round(row['tokens_per_second']))} tokens/s",
    ]
    if row["mfu"] is not None:
        parts.append(f"mfu {row['mfu']:.1%}")
    if waiting >= SLOW_DATA:
        parts.append(f"{waiting:.0%} waiting for data")
    # the first step of a run takes longer than the others
    if remaining and row["step"] > 1:
        parts.append(f"{duration_text(remaining)} left")
    return "  ".join(parts)


class SmoothMean:
    """An exponential mean whose bias towards its start at 0 is removed, as in Adam. value: None before the first."""

    def __init__(self, decay: float) -> None:
        self.decay, self.weight, self.total = decay, 0.0, 0.0

    def add(self, value: float) -> None:
        """Add the value of a step."""
        self.total = self.decay * self.total + (1 - self.decay) * value
        self.weight = self.decay * self.weight + (1 - self.decay)

    @property
    def value(self) -> float | None:
        """The mean so far."""
        return self.total / self.weight if self.weight else None


class Bar:
    """A progress bar with the smoothed loss, the speed, the memory and the remaining time; disabled without a terminal.

    Its means begin with this process: a resumed run begins with the loss of its first step.
    """

    def __init__(
        self,
        completed: int,
        last: int,
        rank: int,
        tokens_per_step: int = 0,
        mfu: Callable[[float], float | None] = lambda tokens_per_second: None,
        *,
        on: Console = console,
    ) -> None:
        """completed, last: steps. mfu: the model FLOPs utilization at a speed in tokens/s. on: where it is drawn."""
        self.enabled = rank == 0 and on.is_terminal
        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(complete_style=ACCENT, finished_style=ACCENT),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            NumbersColumn(),
        )
        self.progress = Progress(*columns, console=on, disable=not self.enabled)
        self.task = self.progress.add_task("train", total=last, completed=completed, numbers="")
        self.loss, self.seconds = SmoothMean(LOSS_DECAY), SmoothMean(TIME_DECAY)
        self.tokens_per_step, self.mfu = tokens_per_step, mfu
        # the peak in GiB, of the GPU's allocator or of this process on a CPU
        self.memory: float | None = None

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def step(self, step: int, tokens: int, loss: float | None, seconds: float) -> None:
        """Show a completed step: the tokens so far, its loss (None if it is not finite), and the seconds it took."""
        if not self.enabled:
            return
        if loss is not None:
            self.loss.add(loss)
        self.seconds.add(seconds)
        self.progress.update(self.task, completed=step, numbers="  ".join(self._numbers(tokens)))

    def _numbers(self, tokens: int) -> Iterator[str]:
        """Yield the numbers of the last step, those that matter most first."""
        if self.loss.value is not None:
            yield f"smoothed loss {number_text(self.loss.value)}"
        seconds = self.seconds.value or 0.0
        if seconds > 0:
            speed = self.tokens_per_step / seconds
            yield f"{count_text(round(speed))} tokens/s"
            yield f"{1000 * seconds:,.{0 if seconds >= 0.01 else 1}f} ms/step"
            if (mfu := self.mfu(speed)) is not None:
                yield f"mfu {mfu:.1%}"
        yield f"{count_text(tokens)} tokens"
        if self.memory is not None:
            yield f"{self.memory:.2f} GiB"


class NumbersColumn(ProgressColumn):
    """The numbers of a task on one line, of which a narrow terminal shows the first ones."""

    def render(self, task: Task) -> Text:
        """Return the text of the numbers."""
        return Text(task.fields["numbers"], no_wrap=True, overflow="ellipsis")
