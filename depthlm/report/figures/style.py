"""The style of the report's figures: one hue per mechanism in all of them, grids, ticks and stamps."""

import functools
import importlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from depthlm.config.hydra_context import compose_raw, hydra_at_conf
from depthlm.config.saved import is_own
from depthlm.counts import count_text
from depthlm.sweeps.points import Point

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
# the height of the strip below a figure, in inches
STRIP = 0.2
# of series with one colour: shares of white, negative ones of black
SHADES = (0.0, -0.45, 0.4, 0.6)
DASHES = ("-", (0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))
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


def mechanism_of(point: Point) -> Mechanism:
    """Return the mechanism of a point, with the colour that its classes declare."""
    chosen = tuple(
        f"{name}={value}"
        for name, value in point.settings.items()
        if name == "model" or name.startswith("model/") or (name.startswith("model.") and name.endswith("._target_"))
    )
    return Mechanism(point.mechanism, _colour(point.mechanism, _classes(chosen, point.config_dir)))


def mechanism_of_run(name: str, directory: Path, config: Mapping[str, Any]) -> Mechanism:
    """Return the mechanism of a run from its saved configuration, by dotted keys. name: if the configuration has none.

    Of somebody else's run, only classes of depthlm are imported.
    """
    name = str(config.get("model.name", name))
    classes = [str(config.get(f"model.{part}._target_")) for part in PARTS]
    trusted = is_own(directory) or all(path.startswith("depthlm.") for path in classes)
    return Mechanism(name, _colour(name, classes if trusted else []))


@functools.cache
def _classes(overrides: tuple[str, ...], config_dir: str | Path | None) -> list[str]:
    """Return the classes of the connection and the attention; [] if these overrides cannot be composed."""
    try:
        with hydra_at_conf():
            model = compose_raw(overrides, config_dir).model
        return [str(model[part].get("_target_")) for part in PARTS]
    except (HydraException, OmegaConfBaseException):
        return []


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
        style = Style(shaded(colour, share), MARKERS[number % len(MARKERS)], DASHES[before % len(DASHES)])
        styles.append(style)
    return styles


def shaded(colour: str, share: float) -> str:
    """Return a colour, `#RRGGBB`, mixed with a share of white, or of black if it is negative."""
    from matplotlib.colors import to_hex, to_rgb

    target = 1.0 if share > 0 else 0.0
    return str(to_hex([part + abs(share) * (target - part) for part in to_rgb(colour)])).upper()


def ink(colour: tuple[float, ...]) -> str:
    """Return black or white, whichever is legible on this colour."""
    red, green, blue, *_ = colour
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def subplots(columns: int, width: float, height: float, rows: int = 1, **settings: Any) -> tuple[Any, Any]:
    """Return a figure and its axes, [rows, columns]. It belongs to no display and does not change the caller's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **settings)


def save(figure: Any, path: Path, stamp: str = "", title: str = "") -> None:
    """Write the figure to a file. stamp: small grey text in a strip below it, where it covers nothing."""
    from matplotlib.transforms import Bbox

    if title:
        figure.suptitle(short(title, 90), fontsize="large")
    width, height = figure.get_size_inches()
    strip = STRIP if stamp else 0.0
    if stamp:
        figure.text(0.08 / width, -0.65 * strip / height, stamp, size=7, color="#777777", in_layout=False)
        _pin_legends(figure)
    figure.savefig(path, dpi=140, bbox_inches=Bbox.from_extents(0, -strip, width, height))


def _pin_legends(figure: Any) -> None:
    """Keep the legends outside the axes where the layout puts them; otherwise they would move into the strip."""
    if figure.legends:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    for legend in figure.legends:
        legend.set_bbox_to_anchor((0, 0, 1, 1), transform=figure.transFigure)


def grid(axes: Any, which: str = "both") -> None:
    """Draw a faint grid behind the data, and remove the box around it."""
    axes.grid(alpha=0.25, axis=which)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(
    figure: Any, panels: Iterable[Any], columns: int | None = None, order: Sequence[str] | None = None
) -> None:
    """Draw one legend for all panels below them, in as many columns as fit. order: of its labels."""
    handles: dict[str, Any] = {}
    for panel in panels:
        handles |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    labels = list(order or handles)
    for across in range(min(columns or len(labels), len(labels)), 0, -1):
        legend = figure.legend(
            [handles[label] for label in labels], labels, frameon=False, loc="outside lower center", ncols=across
        )
        if across == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def log_ticks(axis: Any, limits: tuple[float, float], counts: bool = False) -> None:
    """Set few round ticks on a logarithmic axis, even below one decade. counts: write 360M, not 3.6e8."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = limits
    decimals = 0
    if high / low < 4:
        ticks = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        decimals = max(len(f"{tick:.4g}".partition(".")[2]) for tick in ticks)
        axis.set_major_locator(FixedLocator(ticks))
    else:
        factor = high / low
        axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5) if factor < 20 else (1, 3) if factor < 300 else (1,)))

    def text(value: float, _: object) -> str:
        return count_text(value) if counts else f"{value:.{decimals}f}" if decimals else f"{value:g}"

    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(text))


def short(text: str, width: int = 44) -> str:
    """Return text for a legend or a title, truncated where it is long, with dollar signs escaped."""
    text = " ".join(text.split())
    return (text if len(text) <= width else f"{text[: width - 1]}…").replace("$", r"\$")
