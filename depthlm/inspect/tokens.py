"""Maps over the tokens of a text: the names of its tokens on an axis, and panels [source, token]."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from depthlm.data import Tokenizer
from depthlm.inspect.figures import Grid, draw_grid, scale, write_labels
from depthlm.inspect.picture import Array
from depthlm.report.figures.style import subplots

# the tokens of a map, the names on its axis, and the longest name
TOKENS, NAMED, LONGEST = 256, 64, 14
# inches per name
PITCH = 0.11
SPACE = "\u2423"
# title, weights [source, token] of the first tokens, label of each source
TokenMap = tuple[str, Array, list[str]]


def token_names(tokenizer: Tokenizer, tokens: Iterable[int]) -> list[str]:
    """Return the text of each token as a label: spaces and line breaks are visible, dollar signs escaped."""
    return [_label(tokenizer.decode([token])) for token in tokens]


def _label(text: str) -> str:
    letters = [SPACE if letter == " " else letter if letter.isprintable() else repr(letter)[1:-1] for letter in text]
    visible = "".join(letters)
    shown = visible if len(visible) <= LONGEST else f"{visible[: LONGEST - 1]}…"
    # matplotlib reads text between two dollar signs as a formula
    return re.sub(r"\$", r"\\$", shown)


def named_tokens(count: int) -> list[int]:
    """Return which of `count` tokens have a name on an axis: all, or every k-th where there are too many to read."""
    return list(range(0, count, -(-count // NAMED) or 1))


def side(count: int, least: float, pitch: float = PITCH) -> float:
    """Return the length of an axis over `count` tokens, at least `least`, in inches. pitch: the inches of a name."""
    return max(least, pitch * len(named_tokens(count)))


def draw_token_maps(
    maps: Sequence[Sequence[TokenMap]], names: Sequence[str], title: str, rows: str, values: str
) -> Any:
    """Draw rows of maps on one colour scale, with the names of the tokens below each column."""
    down, across = len(maps), len(maps[0])
    heights = [0.5 + max(0.8, 0.2 * max(len(sources) for *_, sources in row)) for row in maps]
    width = side(len(names), 3.0) + 0.5
    size = width * across + 1.2, sum(heights) + 1.4
    figure, axes = subplots(across, *size, rows=down, gridspec_kw={"height_ratios": heights})
    norm, colours = scale([values for row in maps for _, values, _ in row])
    shown = named_tokens(len(names))
    for number, (line, row) in enumerate(zip(axes, maps, strict=True)):
        for place, (heading, values_nt, sources) in zip(line, row, strict=True):
            image = draw_grid(place, Grid(heading, values_nt), norm, colours)
            place.set_yticks(range(len(sources)), sources, size=8)
            last = number == down - 1
            place.set_xticks(shown, [names[token] for token in shown] if last else [], size=7, rotation=90)
    figure.supylabel(rows, fontsize="medium")
    write_labels(figure, title, "token")
    figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02, label=values)
    return figure
