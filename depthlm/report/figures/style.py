"""The colour of each mechanism, the same in all figures, and the styles of series."""

import importlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from depthlm.config.classes import targets
from depthlm.config.saved import is_own
from depthlm.report.rows import Row
from depthlm.runs.plots import DASHES, MARKERS

# of series with one colour: shares of white, negative ones of black
SHADES = (0.0, -0.45, 0.4, 0.6)
# the classes of vanilla's connection and attention
VANILLA = ["depthlm.mechanisms.residual.Residual", "depthlm.model.attention.self_attention.SelfAttention"]
# for mechanisms that declare no colour, from Tol's palette, which colour-blind readers can distinguish
OTHERS = ("#332288", "#44AA99", "#AA4499", "#DDCC77", "#117733", "#6699CC")
PARTS = ("connection", "attention")


class Mechanism(NamedTuple):
    """name: of a preset, or the options of its parts. colour: as "#RRGGBB"; variants of a mechanism share it."""

    name: str
    colour: str


@dataclass(frozen=True)
class Style:
    """The style of a series."""

    colour: str
    marker: str
    dash: Any


def mechanism_of(row: Row) -> Mechanism:
    """Return the mechanism of a row, with the colour that its classes declare.

    Of somebody else's run, only classes of depthlm are imported.
    """
    point = row.points[0]
    if point.overrides:
        return Mechanism(point.mechanism, _colour(point.mechanism, [*targets(point.config.model).values()]))
    # of a folder of runs: the point has the settings of config.yaml, if that can be read
    name = point.settings.get("model", row.label)
    classes = [point.settings.get(f"model.{part}._target_", "") for part in PARTS]
    trusted = is_own(row.runs[0].directory) or all(path.startswith("depthlm.") for path in classes)
    return Mechanism(name, _colour(name, classes if trusted else []))


def _colour(name: str, classes: list[str]) -> str:
    """Return the colour of the first class that declares one; a subclass of vanilla's does not have its colour."""
    vanilla, *_ = map(_declared_colour, VANILLA)
    if classes == VANILLA:
        return vanilla
    declared = [colour for colour in map(_declared_colour, classes) if colour not in ("", vanilla)]
    return declared[0] if declared else OTHERS[zlib.crc32(name.encode()) % len(OTHERS)]


def _declared_colour(class_name: str) -> str:
    """Return the colour of a class; "" if it has none."""
    from matplotlib.colors import is_color_like, to_hex

    module, _, attribute = class_name.rpartition(".")
    try:
        colour = getattr(getattr(importlib.import_module(module), attribute, None), "colour", "")
    except (ImportError, ValueError):
        return ""
    return to_hex(colour).upper() if is_color_like(colour) else ""


def style_of(mechanisms: Sequence[Mechanism]) -> list[Style]:
    """Return a style for each series; those with one colour share the hue and differ in marker, dash and shade."""
    colours = [mechanism.colour for mechanism in mechanisms]
    styles = []
    for number, colour in enumerate(colours):
        before, count = colours[:number].count(colour), colours.count(colour)
        # dashes distinguish a few series; with more, the shades form a scale
        share = SHADES[before] if count <= len(SHADES) else 0.65 * before / (count - 1)
        style = Style(shade(colour, share), MARKERS[number % len(MARKERS)], DASHES[before % len(DASHES)])
        styles.append(style)
    return styles


def shade(colour: str, share: float) -> str:
    """Return a colour, `#RRGGBB`, mixed with a share of white, or of black if it is negative."""
    from matplotlib.colors import to_hex, to_rgb

    target = 1.0 if share > 0 else 0.0
    return str(to_hex([part + abs(share) * (target - part) for part in to_rgb(colour)])).upper()
