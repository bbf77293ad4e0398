"""The console that commands print to. It is as wide as the terminal; redirected output is wide enough for any path."""

import logging
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console

log = logging.getLogger("depthlm")
REDIRECTED_WIDTH = 400


def stdout_console(redirected_width: int = REDIRECTED_WIDTH) -> Console:
    """Return a console on standard output."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else redirected_width)


class Lossy:
    """A text stream that drops everything from the first error on, such as that of a closed pipe or a full disk."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self.stream, self.name = stream, name
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write text, or drop it."""
        if self.error is None:
            try:
                self.stream.write(text)
            except OSError as error:
                self._drop(error)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, or drop it."""
        if self.error is None:
            try:
                self.stream.flush()
            except OSError as error:
                self._drop(error)

    def report(self) -> None:
        """Log that output was dropped, if it was."""
        if self.error is not None:
            log.warning("%s cannot be written (%s); the run continues, and train.log is kept", self.name, self.error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _drop(self, error: OSError) -> None:
        self.error = error
        # what is still in the buffers would raise again when the process ends; a captured stream has no descriptor
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        self.report()


def continue_without_output() -> None:
    """Let standard output and standard error drop what they cannot write, instead of raising an error."""
    sys.stdout = Lossy(sys.stdout, "standard output")
    sys.stderr = Lossy(sys.stderr, "standard error")


def report_dropped_output() -> None:
    """Log which output was dropped before logging began."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Lossy):
            stream.report()
