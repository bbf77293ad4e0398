"""What all figures share: markers, grids, ticks, legends, titles and stamps."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from depthlm.counts import count_text
from depthlm.files import check_regular, replacing

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
DASHES = ("-", (0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))
# from the palette of Okabe and Ito
HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
# the height of the strip below a figure, in inches
STRIP = 0.2


def subplots(columns: int, width: float, height: float, rows: int = 1, **settings: Any) -> tuple[Any, Any]:
    """Return a figure and its axes, [rows, columns]. It belongs to no display and does not change the caller's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **settings)


def save(figure: Any, path: Path, stamp: str = "", title: str = "") -> None:
    """Write the figure to a file. stamp: small grey text in a strip below it, where it covers nothing.

    Raises OSError.
    """
    from matplotlib.transforms import Bbox

    if title:
        figure.suptitle(short(title, 90), fontsize="large")
    width, height = figure.get_size_inches()
    strip = STRIP if stamp else 0.0
    if stamp:
        figure.text(0.08 / width, -0.65 * strip / height, stamp, size=7, color="#777777", in_layout=False)
        _pin_legends(figure)
    check_regular(path)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=140, bbox_inches=Bbox.from_extents(0, -strip, width, height))


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

    def text(value: float, _: object = None) -> str:
        return count_text(value) if counts else f"{value:.{decimals}f}" if decimals else f"{value:g}"

    if high / low < 4:
        ticks = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        decimals = max(len(f"{tick:.4g}".partition(".")[2]) for tick in ticks)
        # over a small range, several ticks have the same text
        distinct_ticks = {text(tick): tick for tick in reversed(ticks)}
        axis.set_major_locator(FixedLocator(sorted(distinct_ticks.values())))
    else:
        factor = high / low
        axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5) if factor < 20 else (1, 3) if factor < 300 else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(text))


def short(text: str, width: int = 44) -> str:
    """Return text for a legend or a title, truncated where it is long, with dollar signs escaped.

    A legend would leave out text with an underscore first.
    """
    text = " ".join(text.split())
    text = f" {text}" if text.startswith("_") else text
    return (text if len(text) <= width else f"{text[: width - 1]}…").replace("$", r"\$")


def distinct(texts: Sequence[str], width: int = 44) -> list[str]:
    """Return texts for a legend or an axis as `short` does, but as long as different ones need to stay different."""
    # a name with an underscore first gets a space
    for wider in range(width, 1 + max(map(len, texts), default=0)):
        shortened = [short(text, wider) for text in texts]
        if len({*shortened}) == len({*texts}):
            return shortened
    return [short(text, max(width, 1 + len(text))) for text in texts]


def ink(colour: tuple[float, ...]) -> str:
    """Return black or white, whichever is legible on this colour."""
    red, green, blue, *_ = colour
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _pin_legends(figure: Any) -> None:
    """Keep the legends outside the axes where the layout puts them; otherwise they would move into the strip."""
    if figure.legends:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    for legend in figure.legends:
        legend.set_bbox_to_anchor((0, 0, 1, 1), transform=figure.transFigure)
