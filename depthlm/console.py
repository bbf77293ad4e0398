"""The console that commands print to. It is as wide as the terminal; redirected output is wide enough for any path."""

import sys

from rich.console import Console

REDIRECTED_WIDTH = 400


def stdout_console(redirected_width: int = REDIRECTED_WIDTH) -> Console:
    """Return a console on standard output."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else redirected_width)
