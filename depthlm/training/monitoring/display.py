"""Console output of a run: tables, a progress bar on a terminal, plain log lines elsewhere."""

import logging
import sys
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from rich import box
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from depthlm.console import report_dropped_output, stdout_console
from depthlm.runs.validation_losses import ValidationLosses, perplexity

log = logging.getLogger("depthlm")
console = stdout_console()


def start_logging(rank: int) -> None:
    """Log to the console, and keep the lines for train.log; ranks other than 0 log only warnings and errors."""
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.propagate = False
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    if console.is_terminal:
        screen: logging.Handler = RichHandler(console=console, show_path=False, show_level=False, log_time_format="%X")
    else:
        screen = logging.StreamHandler(sys.stdout)
        screen.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    log.addHandler(screen)
    if rank == 0:
        log.addHandler(MemoryHandler(1000, flushLevel=logging.CRITICAL + 1, flushOnClose=False))
    report_dropped_output()


def log_to(file: Path) -> None:
    """Log to a file as well, beginning with the lines logged before it was opened."""
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


class Bar:
    """A progress bar with loss, tokens/s and remaining time; disabled without a terminal."""

    def __init__(self, completed: int, last: int, rank: int) -> None:
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("remaining"),
            TimeRemainingColumn(),
            console=console,
            disable=rank != 0 or not console.is_terminal,
        )
        self.task = self.progress.add_task("train", total=last, completed=completed, loss="-", speed="-")

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def step(self, step: int) -> None:
        """Show the number of completed steps."""
        self.progress.update(self.task, completed=step)

    def row(self, row: dict[str, Any]) -> None:
        """Show the newest loss and speed."""
        self.progress.update(self.task, loss=number_text(row["loss"]), speed=f"{row['tokens_per_second']:,.0f}")


def number_text(value: float | None) -> str:
    """Format a number with four decimals, or a tiny one as 1.2e-05; None stands for a non-finite number."""
    if value is None:
        return "not finite"
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def validation_text(losses: ValidationLosses, diagnostics: dict[str, float | None]) -> str:
    """Format the results of a validation as one line: losses with their perplexities, and the diagnostics."""
    parts = [
        f"validation/{name} loss {number_text(loss)} (perplexity {number_text(perplexity(loss))})"
        for name, loss in losses.by_set.items()
    ]
    return "  ".join([*parts, *(f"{name} {number_text(value)}" for name, value in diagnostics.items())])


def row_text(row: dict[str, Any], last: int) -> str:
    """Format a row of metrics as one line."""
    parts = [
        f"step {row['step']}/{last}",
        f"loss {number_text(row['loss'])}",
        f"lr {row['learning_rate']:.2e}",
        f"grad norm {row['grad_norm']:.3f}" if row["grad_norm"] is not None else "skipped",
        f"{row['tokens_per_second']:,.0f} tokens/s",
    ]
    if row["mfu"] is not None:
        parts.append(f"mfu {row['mfu']:.1%}")
    return "  ".join(parts)
