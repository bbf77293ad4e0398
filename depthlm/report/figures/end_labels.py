"""Names at the right ends of curves, in place of a legend."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# points of the text, and of one line of it
SIZE, LINE = 8, 10


@dataclass(frozen=True)
class End:
    """The right end of a curve, in data coordinates, and its name."""

    name: str
    colour: str
    x: float
    y: float


def label_ends(axes: Any, ends: Sequence[End], height: float) -> None:
    """Write each name at the right of the axes, at the height of its curve's end if there is space.

    Names that would overlap are moved apart and connected to their ends by a thin line, if these are inside the limits
    of the axes, which must be set before. height: that of the axes, in inches.
    """
    low, high = axes.get_ylim()
    wanted = [min(max((end.y - low) / (high - low), 0.0), 1.0) for end in ends]
    for end, place in zip(ends, moved_apart(wanted, LINE / (72 * height)), strict=True):
        line = {"arrowstyle": "-", "color": end.colour, "lw": 0.5, "relpos": (0, 0.5), "shrinkA": 1}
        axes.annotate(
            end.name,
            (end.x, end.y),
            xytext=(1.06, place),
            textcoords="axes fraction",
            annotation_clip=False,
            color=end.colour,
            size=SIZE,
            va="center",
            arrowprops=line if low <= end.y <= high else None,
        )


def width_of(names: Sequence[str]) -> float:
    """Return about how wide the longest of these names is, in inches."""
    return max(map(len, names), default=0) * 0.6 * SIZE / 72


def moved_apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Return positions at least `gap` apart, in the order of those wanted, with the least sum of squared moves.

    Positions that are equal keep their order. They stay between 0 and 1 where there is space for all.
    """
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    # without the gaps between them, the positions must not fall: neighbours that do are replaced by their mean
    blocks: list[tuple[float, int]] = []
    for rank, number in enumerate(order):
        total, count = wanted[number] - rank * gap, 1
        while blocks and blocks[-1][0] / blocks[-1][1] >= total / count:
            earlier = blocks.pop()
            total, count = total + earlier[0], count + earlier[1]
        blocks.append((total, count))
    levels = [total / count for total, count in blocks for _ in range(count)]
    # the highest level at which all positions above it fit, and not below the axes
    top = max(1 - (len(order) - 1) * gap, 0.0)
    places = dict(zip(order, (min(max(level, 0.0), top) for level in levels), strict=True))
    ranks = {number: rank for rank, number in enumerate(order)}
    return [places[number] + ranks[number] * gap for number in range(len(wanted))]
