"""Console output of a run: tables and log lines. `bar.py` draws the progress bar of a terminal."""

import logging
import sys
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from rich import box
from rich.logging import RichHandler
from rich.table import Table

from depthlm.console import stdout_console
from depthlm.runs.validation_losses import ValidationLosses, perplexity
from depthlm.streams import printable, report_dropped_output

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
    # a message may quote a file of somebody else
    log.addFilter(plain_message)
    report_dropped_output()


def plain_message(record: logging.LogRecord) -> bool:
    """Escape the control characters of a message. Returns true, as a filter of a logger that keeps it."""
    record.msg, record.args = printable(record.getMessage()), ()
    return True


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


def number_text(value: float | None) -> str:
    """Format a number with four decimals, or a tiny one as 1.2e-05; None stands for a non-finite number."""
    if value is None:
        return "not finite"
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def step_time_text(seconds: float) -> str:
    """Format the time of a step: 0.25 as `250 ms/step`, 0.0025 as `2.5 ms/step`."""
    return f"{1000 * seconds:,.{0 if seconds >= 0.01 else 1}f} ms/step"


def validation_text(losses: ValidationLosses, diagnostics: dict[str, float | None]) -> str:
    """Format the results of a validation as one line: losses with their perplexities, and the diagnostics."""
    parts = [
        f"validation/{name} loss {number_text(loss)} (perplexity {number_text(perplexity(loss))})"
        for name, loss in losses.by_set.items()
    ]
    return "  ".join([*parts, *(f"{name} {number_text(value)}" for name, value in diagnostics.items())])


def row_text(row: dict[str, Any], last: int, steps: int, seconds: float) -> str:
    """Format a row of metrics as one line. last: the run's last step.

    steps, seconds: the steps since the previous row, and the time that they took.
    """
    mean_loss = "none: no update" if row["mean_loss"] is None else number_text(row["mean_loss"])
    parts = [
        f"step {row['step']}/{last}",
        f"mean loss {mean_loss}",
        f"lr {row['learning_rate']:.2e}",
        f"grad norm {row['grad_norm']:.3f}" if row["grad_norm"] is not None else "skipped",
        f"{row['tokens_per_second']:,.0f} tokens/s",
        f"{step_time_text(seconds / steps)} ({row['data_seconds'] / seconds:.1%} waiting for data)",
    ]
    if row["mfu"] is not None:
        parts.append(f"mfu {row['mfu']:.1%}")
    return "  ".join(parts)
