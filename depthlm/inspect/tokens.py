"""Maps over the tokens of a text: the names of its tokens on an axis, and panels [source, token]."""

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from depthlm.data import Tokenizer
from depthlm.inspect.figures import scale
from depthlm.inspect.picture import Picture, TokenMap
from depthlm.report.figures.style import subplots

# the tokens of a map, the names on its axis, and the longest name
TOKENS, NAMED, LONGEST = 256, 64, 14
# inches per name
PITCH = 0.11
SPACE = "\u2423"


def token_names(tokenizer: Tokenizer, tokens: Iterable[int]) -> list[str]:
    """Return the text of each token as a label: spaces and line breaks are visible, dollar signs escaped."""
    return [_label(tokenizer.decode([token])) for token in tokens]


def _label(text: str) -> str:
    visible = "".join(
        SPACE if letter == " " else letter if letter.isprintable() else repr(letter)[1:-1] for letter in text
    )
    shown = visible if len(visible) <= LONGEST else f"{visible[: LONGEST - 1]}…"
    # matplotlib reads text between two dollar signs as a formula
    return re.sub(r"\$", r"\\$", shown)


def named_tokens(count: int) -> list[int]:
    """Return which of `count` tokens have a name on an axis: all, or every k-th where there are too many to read."""
    return list(range(0, count, -(-count // NAMED) or 1))


def side(count: int, least: float, pitch: float = PITCH) -> float:
    """Return the length of an axis over `count` tokens, at least `least`, in inches. pitch: the inches of a name."""
    return max(least, pitch * len(named_tokens(count)))


def token_picture(
    name: str, about: str, maps: Sequence[Sequence[TokenMap]], names: Sequence[str], title: str, rows: str, values: str
) -> list[Picture]:
    """Return the picture of maps [source, token], as rows of panels; no picture if there are no maps.

    names: of the tokens. rows, values: labels of the sources and of the colour bar.
    """
    if not maps:
        return []
    arrays = {one.name: one.values for row in maps for one in row}
    return [Picture(name, about, arrays, partial(draw_token_maps, maps, names, title, rows, values))]


def draw_token_maps(
    maps: Sequence[Sequence[TokenMap]], names: Sequence[str], title: str, rows: str, values: str
) -> Any:
    """Draw rows of maps on one colour scale, with the names of the tokens below each column."""
    down, across = len(maps), len(maps[0])
    heights = [0.5 + max(0.8, 0.2 * max(len(one.sources) for one in row)) for row in maps]
    width = side(len(names), 3.0) + 0.5
    figure, axes = subplots(
        across, width * across + 1.2, sum(heights) + 1.4, rows=down, gridspec_kw={"height_ratios": heights}
    )
    norm, colours = scale([one.values for row in maps for one in row])
    shown = named_tokens(len(names))
    for number, (line, row) in enumerate(zip(axes, maps, strict=True)):
        for place, one in zip(line, row, strict=True):
            image = place.imshow(one.values, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
            place.set_title(one.title, fontsize="medium")
            place.tick_params(length=0)
            place.spines[:].set_visible(False)
            place.set_yticks(range(len(one.sources)), one.sources, size=8)
            last = number == down - 1
            place.set_xticks(shown, [names[token] for token in shown] if last else [], size=7, rotation=90)
    figure.supylabel(rows, fontsize="medium")
    figure.supxlabel("token", fontsize="medium")
    figure.suptitle(title, fontsize="medium")
    figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02, label=values)
    return figure
