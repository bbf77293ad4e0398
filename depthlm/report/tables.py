"""Tables of text and numbers, as Markdown and on a terminal."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

DASH, MISSING = "–", "missing"


@dataclass(frozen=True)
class Cell:
    """A cell of a table, as plain text."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class Table:
    """A head and rows of the same width; the first column contains text, the others numbers."""

    head: list[str]
    rows: list[list[Cell]]
    title: str = ""
    # whether every column contains text
    words: bool = field(default=False, kw_only=True)


def cells(values: Sequence[str]) -> list[Cell]:
    """Return a row of plain-text cells."""
    return [Cell(value) for value in values]


def markdown(table: Table) -> str:
    """Return the table in GitHub's Markdown, with its title as a bold line above."""
    rows = [[f"**{plain(c.text)}**" if c.bold else plain(c.text) for c in row] for row in table.rows]
    columns = list(zip([plain(text) for text in table.head], *rows, strict=True))
    widths = [max(3, *(len(text) for text in column)) for column in columns]
    left = [number == 0 or table.words for number in range(len(widths))]

    def line(texts: Sequence[str]) -> str:
        padded = [
            text.ljust(width) if is_left else text.rjust(width)
            for text, width, is_left in zip(texts, widths, left, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if is_left else "-" * (width - 1) + ":" for width, is_left in zip(widths, left, strict=True)]
    lines = [line([plain(text) for text in table.head]), line(rule), *(line(row) for row in rows)]
    return "\n".join(([f"**{plain(table.title)}**", ""] if table.title else []) + lines)


def plain(text: str) -> str:
    """Escape text so that Markdown shows it literally, on one line, also inside a table."""
    text = re.sub(r"([\\`*|<\[\]])", r"\\\1", " ".join(text.split()))
    # Markdown does not interpret an underscore inside a word
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)


def show(table: Table, console: Console) -> None:
    """Print a table on the terminal."""
    shown = RichTable(
        title=escape(table.title) or None, box=box.SIMPLE, title_justify="left", title_style="bold", pad_edge=False
    )
    for number, text in enumerate(table.head):
        shown.add_column(escape(text), justify="left" if number == 0 or table.words else "right")
    for row in table.rows:
        shown.add_row(*(f"[bold]{escape(cell.text)}[/bold]" if cell.bold else escape(cell.text) for cell in row))
    console.print(shown)


def number_text(value: float | None, digits: int) -> str:
    """Return a number with `digits` decimals; a dash for None, nan or infinity."""
    if value is None or not math.isfinite(value):
        return DASH
    # adding 0.0 removes the sign of a rounded -0.000
    return f"{round(value, digits) + 0.0:,.{digits}f}"


def signed_text(value: float | None, digits: int) -> str:
    """Return a difference with its sign and `digits` decimals; a dash for None, nan or infinity."""
    text = number_text(value, digits)
    return f"+{text}" if value is not None and math.isfinite(value) and round(value, digits) > 0 else text


def short_text(value: float | None, digits: int = 4) -> str:
    """Return a number with `digits` significant digits; a dash for None, nan or infinity."""
    return DASH if value is None or not math.isfinite(value) else f"{value:.{digits}g}"
