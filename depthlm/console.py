"""The consoles that commands print to, as wide as the terminal. Redirected output is wide enough for any path."""

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from depthlm.streams import printable

REDIRECTED_WIDTH = 400


class PlainConsole(Console):
    """A console that escapes control characters in the text that it prints, and writes only those of its styles."""

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return a text with its markup, before the widths of columns are measured."""
        return super().render_str(printable(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of a renderable."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def stdout_console(redirected_width: int = REDIRECTED_WIDTH) -> Console:
    """Return a console on standard output."""
    return PlainConsole(highlight=False, width=None if sys.stdout.isatty() else redirected_width)


def stderr_console(**settings: Any) -> Console:
    """Return a console on standard error. settings: arguments of rich's Console."""
    return PlainConsole(stderr=True, highlight=False, **settings)
