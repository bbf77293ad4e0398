"""The standard streams of a command: opening them, escaping text for them, and writing without errors."""

import logging
import os
import re
import sys
from contextlib import suppress
from typing import Any, TextIO

log = logging.getLogger("depthlm")
# control characters but tabs and line breaks, marks that reverse the direction of text, and halves of surrogates
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return a text with escapes such as \\x1b in place of characters with which a file could control a terminal."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def prepare_streams() -> None:
    """Open the standard streams that are closed.

    A file that is opened later would otherwise take the number of a closed stream, and receive what libraries print.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None and os.open(os.devnull, os.O_RDWR) == number:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8"))


class LossyStream:
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
    sys.stdout = LossyStream(sys.stdout, "standard output")
    sys.stderr = LossyStream(sys.stderr, "standard error")


def report_dropped_output() -> None:
    """Log which output was dropped before logging began."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, LossyStream):
            stream.report()
