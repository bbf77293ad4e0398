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

    @property
    def is_text(self) -> list[bool]:
        """Whether each column contains text, which is aligned to the left."""
        return [self.words or number == 0 for number in range(len(self.head))]


def cells(values: Sequence[str]) -> list[Cell]:
    """Return a row of plain-text cells."""
    return [Cell(value) for value in values]


def markdown(table: Table) -> str:
    """Return the table in GitHub's Markdown, with its title as a bold line above."""
    head = [plain(text) for text in table.head]
    rows = [[f"**{plain(cell.text)}**" if cell.bold else plain(cell.text) for cell in row] for row in table.rows]
    widths = [max(3, *map(len, column)) for column in zip(head, *rows, strict=True)]
    columns = list(zip(widths, table.is_text, strict=True))
    rule = ["-" * width if is_text else "-" * (width - 1) + ":" for width, is_text in columns]
    lines = [f"**{plain(table.title)}**", ""] if table.title else []
    for texts in (head, rule, *rows):
        padded = [
            text.ljust(width) if is_text else text.rjust(width)
            for text, (width, is_text) in zip(texts, columns, strict=True)
        ]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


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
    for text, is_text in zip(table.head, table.is_text, strict=True):
        shown.add_column(escape(text), justify="left" if is_text else "right")
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
