"""Pictures, and the functions that draw them: grids of weights, curves over depth, small matrices, distributions.

This module also collects what is drawn: means over tokens, and the values of a figure at all places in depth.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from depthlm.model.figures import Figure
from depthlm.runs.plots import DASHES, HUES, MARKERS, grid, ink, log_ticks, subplots

Array = NDArray[np.floating]
NOTHING = "#DADADA"
# with more rows or columns, numbers in the cells are too small to read
NUMBERED = 12
# the tokens of a map
TOKENS = 256
# the ends of the shaded range of a distribution, and the line between them
QUANTILES = (0.05, 0.5, 0.95)
DISTRIBUTION = "line: the median over the hidden size, shaded: from its 5th to its 95th percentile"
# the most panels of distributions side by side, and inches of one
ACROSS, WIDE, HIGH = 6, 1.9, 1.5


class Picture(NamedTuple):
    """One PNG. about: its content in one line. arrays: keyed by name in arrays.npz. draw: returns the figure."""

    name: str
    about: str
    arrays: dict[str, Array]
    draw: Callable[[], Any]


class Place(NamedTuple):
    """Where in depth. kind: of the sublayer of a connection, or final; "" for an attention. layer: unrolled."""

    kind: str
    layer: int


class Grid(NamedTuple):
    """A panel of cells [row, column], empty where nan.

    last_row: a label for the last row instead of its number. rows: labels for all rows.
    """

    title: str
    values: Array
    last_row: str | None = None
    rows: Sequence[str] = ()


class Means:
    """Means over the tokens of several forward passes, by key: arrays or tensors."""

    def __init__(self) -> None:
        self.sums: dict[Any, Any] = {}
        self.tokens: Counter[Hashable] = Counter()

    def add(self, key: Hashable, mean: Any, tokens: int) -> None:
        """Add the mean over `tokens` tokens."""
        self.sums[key] = self.sums.get(key, 0.0) + tokens * mean
        self.tokens[key] += tokens

    def __getitem__(self, key: Hashable) -> Any:
        return self.sums[key] / self.tokens[key]


class FigureOverDepth:
    """A figure of a mechanism: collects its values at all places in depth, and draws them.

    name: of its arrays and pictures. figure: the first one, which has the axes and labels of all. depth: the number of
    unrolled layers. means, maps: what it keeps of the places.
    """

    def __init__(self, mechanism: str, figure: Figure, depth: int) -> None:
        self.name = f"{mechanism}_{figure.name}"
        self.figure = figure
        self.depth = depth
        self.title = f"{mechanism}: {figure.about}"
        self.means = Means()
        self.maps = dict[Place, Array]()

    def add(self, figure: Figure, place: Place, tokens: int) -> None:
        """Add the values of one place in a forward pass over `tokens` tokens."""
        raise NotImplementedError

    def pictures(self) -> list[Picture]:
        """Return the pictures; empty if there is nothing to draw."""
        raise NotImplementedError


def average_axes(values: Array, axes: Sequence[str], over: Sequence[str]) -> tuple[Array, list[str]]:
    """Return the mean over the axes named in `over`, and the names of the other axes."""
    away = tuple(number for number, axis in enumerate(axes) if axis in over)
    return values.mean(away), [axis for axis in axes if axis not in over]


def spread(count: int, wanted: int) -> list[int]:
    """Return `wanted` evenly spaced numbers below `count`, including the first and the last one."""
    return sorted({round(number) for number in np.linspace(0, count - 1, wanted)})


def draw_grids(grids: Sequence[Grid], title: str, rows: str, columns: str, values: str) -> Any:
    """Draw panels side by side with one colour scale. rows, columns, values: axis labels."""
    height, width = (max(grid.values.shape[axis] for grid in grids) for axis in (0, 1))
    wide = 1.0 + max(2.2, width * np.clip(5.5 / width, 0.075, 0.5))
    high = 0.8 + max(0.7, height * np.clip(5.0 / height, 0.105, 0.4))
    figure, axes = subplots(len(grids), wide * len(grids) + 0.9, high + 0.5)
    norm, colours = scale([grid.values for grid in grids])
    for place, panel in zip(axes[0], grids, strict=True):
        image = draw_grid(place, panel, norm, colours)
        # align the rows of all panels
        place.set_ylim(height - 0.5, -0.5)
    axes[0, 0].set_ylabel(rows)
    write_labels(figure, title, columns)
    beyond = max(np.nanmax(grid.values) for grid in grids) > norm.vmax
    figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02, label=values, extend="max" if beyond else "neither")
    return figure


def scale(values: Sequence[Array]) -> tuple[Any, Any]:
    """Return a norm and a colour map from 0 to the largest value, or symmetric around 0 if there are negative values.

    Rows with one cell are ignored: a single source has all the weight, which would hide differences in other rows.
    """
    import matplotlib
    from matplotlib.colors import Normalize

    rows = [row[np.isfinite(row)] for part in values for row in part]
    finite = np.concatenate([row for row in rows if row.size > 1] or rows)
    most = float(np.abs(finite).max(initial=0)) or 1.0
    signed = bool((finite < 0).any())
    colours = matplotlib.colormaps["PuOr_r" if signed else "viridis_r"].with_extremes(bad=NOTHING)
    return Normalize(-most if signed else 0.0, most), colours


def draw_grid(axes: Any, panel: Grid, norm: Any, colours: Any) -> Any:
    """Draw one panel. Return the image, for a colour bar."""
    height, width = panel.values.shape
    image = axes.imshow(panel.values, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    axes.set_title(panel.title, fontsize="medium")
    last = height - (panel.last_row is not None)
    down = [*range(height)] if panel.rows else _ticks(last)
    names = [*panel.rows] or [str(number) for number in down]
    if panel.last_row is not None:
        down, names = [*down, last], [*names, panel.last_row]
        axes.axhline(last - 0.5, color="white", lw=3)
    axes.set_yticks(down, names)
    axes.set_xticks(_ticks(width))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if max(height, width) <= NUMBERED:
        for (row, column), value in np.ndenumerate(panel.values):
            if np.isfinite(value):
                colour, text = ink(colours(norm(value))), number_text(float(value))
                axes.text(column, row, text, ha="center", va="center", size=7, color=colour)
    return image


def draw_curves(panels: Mapping[str, Mapping[str, Array]], title: str, x: str, y: str) -> Any:
    """Draw curves over depth, with one panel per group."""
    figure, axes = subplots(len(panels), 5.2 * len(panels) + 0.6, 3.8, sharey=True)
    every = np.concatenate([values[np.isfinite(values)] for curves in panels.values() for values in curves.values()])
    low, high, largest = every.min(), every.max(), np.abs(every).max() or 1.0
    for place, (name, curves) in zip(axes[0], panels.items(), strict=True):
        for number, (label, values) in enumerate(curves.items()):
            # many markers would hide the line
            marker = MARKERS[number % len(MARKERS)] if len(values) <= 40 else ""
            style = {"color": HUES[number % len(HUES)], "ls": DASHES[number % len(DASHES)], "marker": marker}
            place.plot(values, **style, ms=3.5, lw=1.5, label=label)
        place.set_title(name, fontsize="medium")
        place.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        grid(place)
    if low > 0 and high > 10 * low:
        axes[0, 0].set_yscale("log")
        log_ticks(axes[0, 0].yaxis, (low, high))
    elif high - low < 0.1 * largest:
        # without a margin, the axis would magnify rounding errors
        axes[0, 0].set_ylim(low - 0.1 * largest, high + 0.1 * largest)
    axes[0, 0].set_ylabel(y)
    if max(map(len, panels.values())) > 1:
        axes[0, -1].legend(frameon=False)
    write_labels(figure, title, x)
    return figure


def draw_matrices(rows: Sequence[Sequence[tuple[str, Array]]], title: str, sums: str) -> Any:
    """Draw square matrices with their numbers and with the sum of each row and column. sums: what these are.

    Each matrix has its own colour scale, since a product of many matrices may be larger by any factor.
    """
    size = len(rows[0][0][1])
    side = 0.8 + 0.34 * size
    figure, axes = subplots(len(rows[0]), side * len(rows[0]) + 0.9, (side + 0.25) * len(rows) + 0.5, rows=len(rows))
    for line, row in zip(axes, rows, strict=True):
        for place, (name, matrix) in zip(line, row, strict=True):
            draw_grid(place, Grid(name, matrix), *scale([matrix]))
            place.set_xticks(range(size), [number_text(total) for total in matrix.sum(0)], size=7, rotation=90)
            place.set_yticks(range(size), [number_text(total) for total in matrix.sum(1)], size=7)
    write_labels(figure, title, sums)
    return figure


def draw_distributions(places: Mapping[str, tuple[Array, Sequence[str]]], title: str, columns: str, values: str) -> Any:
    """Draw the quantiles of each place, [quantile, input, source], over its sources.

    places: by their titles, the quantiles and the names of the inputs. columns, values: axis labels.
    """
    inputs = list(dict.fromkeys(name for _, names in places.values() for name in names))
    across = min(ACROSS, math.ceil(math.sqrt(len(places))))
    rows = math.ceil(len(places) / across)
    figure, axes = subplots(across, max(5.0, WIDE * across + 0.6), HIGH * rows + 1.0, rows, sharex=True, sharey=True)
    for panel, (title_of_place, (of_place, names)) in zip(axes.flat, places.items(), strict=False):
        for name, (low, median, high) in zip(names, of_place.swapaxes(0, 1), strict=True):
            colour, sources = HUES[inputs.index(name) % len(HUES)], np.arange(len(median))
            # a first layer has one source
            marker = "." if np.isfinite(median).sum() == 1 else None
            panel.fill_between(sources, low, high, color=colour, alpha=0.2, lw=0)
            panel.plot(sources, median, color=colour, lw=1.2, marker=marker, label=name)
            if marker:
                panel.vlines(sources, low, high, color=colour, alpha=0.3)
        panel.axhline(0, color="black", lw=0.6)
        panel.set_title(title_of_place, fontsize="small", pad=3)
        panel.xaxis.get_major_locator().set_params(integer=True)
        grid(panel)
    for number in range(len(places), axes.size):
        axes.flat[number].set_visible(False)
        axes.flat[number - across].tick_params(labelbottom=True)
    if len(inputs) > 1:
        lines = {line.get_label(): line for panel in axes.flat for line in panel.lines}
        figure.legend([lines[name] for name in inputs], inputs, frameon=False, loc="outside right center")
    figure.supylabel(values, fontsize="medium")
    write_labels(figure, title, columns)
    return figure


def write_labels(figure: Any, title: str, x: str) -> None:
    """Write the title above a figure, in as many lines as its width needs, and the label of its columns below it."""
    figure.supxlabel(x, fontsize="medium")
    figure.suptitle(textwrap.fill(title, int(13 * figure.get_figwidth())), fontsize="medium")


def number_text(value: float) -> str:
    """Format a number with at most five characters and a sign."""
    if abs(value) < 100:
        return f"{round(value, 2) + 0.0:.2f}"  # no minus before 0.00
    return f"{value:.0f}" if abs(value) < 1e4 else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")


def _ticks(count: int) -> list[int]:
    return list(range(0, count, -(-count // 12) or 1))
