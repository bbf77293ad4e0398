"""Where commands print: as wide as a terminal, and wide enough for any path where the output goes to a file."""

import sys

from rich.console import Console

REDIRECTED_WIDTH = 400


def stdout_console(redirected_width: int = REDIRECTED_WIDTH) -> Console:
    """A console on standard output."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else redirected_width)
