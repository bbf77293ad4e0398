"""The style of the report's figures: one colour per mechanism in all of them, grids and ticks."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthlm.counts import count_text
from depthlm.report.rows import Row

# colours of Okabe and Ito, and of Tol, that colour-blind readers can distinguish; variants of a mechanism share a hue
COLOURS = {
    "vanilla": "#4D4D4D",
    "depth_attention": "#0072B2",
    "uniform_mix": "#7A6FC8",
    "moda": "#56B4E9",
    "attention_residuals": "#D55E00",
    "attention_residuals_full": "#8C2D04",
    "attention_residuals_recency": "#F4A582",
    "dca": "#009E73",
    "grn_v1": "#A6DBA0",
    "grn_v2": "#5AAE61",
    "grn_v3": "#1B7837",
    "mhc": "#CC79A7",
    "hyper_connections": "#882255",
    "denseformer": "#E69F00",
    "laurel": "#999933",
}
OTHERS = ("#332288", "#44AA99", "#AA4499", "#DDCC77", "#117733", "#6699CC")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
# the height of the strip below a figure, in inches
STRIP = 0.2
DASHES = ("-", (0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))


@dataclass(frozen=True)
class Look:
    """The style of a series."""

    colour: str
    marker: str
    dash: Any


def colour_of(mechanism: str) -> str:
    """Return the colour of a mechanism, the same in every figure; for a pair, that of its first part that has one."""
    parts = mechanism.replace(",", "+").split("+")
    known = [COLOURS[part] for part in parts if part in COLOURS and part != "vanilla"]
    if known or mechanism == "vanilla":
        return known[0] if known else COLOURS["vanilla"]
    return OTHERS[zlib.crc32(mechanism.encode()) % len(OTHERS)]


def mechanism_of(row: Row) -> str:
    """Return the mechanism of a row from its settings: a preset, or the parts that replace vanilla's."""
    settings = row.settings
    parts = [value for name, value in settings.items() if name in ("model/connection", "model/attention")]
    named = settings.get("model", "vanilla" if not parts else "")
    return "+".join(filter(None, ["" if parts and named == "vanilla" else named, *parts])) or "vanilla"


def looks(mechanisms: Sequence[str]) -> list[Look]:
    """Return a look for each series; those of one mechanism share the hue and differ in marker, dash and shade."""
    colours = [colour_of(mechanism) for mechanism in mechanisms]
    styles = []
    for number, colour in enumerate(colours):
        before, every = colours[:number].count(colour), colours.count(colour)
        # dashes distinguish a few series; with more, shades vary too
        pale = 0.0 if every <= len(DASHES) else 0.65 * before / (every - 1)
        look = Look(lightened(colour, pale), MARKERS[number % len(MARKERS)], DASHES[before % len(DASHES)])
        styles.append(look)
    return styles


def lightened(colour: str, share: float) -> str:
    """Return a colour, `#RRGGBB`, mixed with a share of white."""
    parts = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
    return "#" + "".join(f"{round(part + share * (255 - part)):02X}" for part in parts)


def subplots(columns: int, width: float, height: float, rows: int = 1, **settings: Any) -> tuple[Any, Any]:
    """Return a figure and its axes, [rows, columns]. It belongs to no display and does not change the caller's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **settings)


def save(figure: Any, path: Path, stamp: str = "") -> None:
    """Write the figure to a file. stamp: small grey text in a strip below it, where it covers nothing."""
    from matplotlib.transforms import Bbox

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
