"""The distribution of weights over the hidden size: a small panel for each place in depth, a line for each input."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from depthlm.inspect.picture import Array, write_labels
from depthlm.runs.plots import HUES, grid, subplots

# the ends of the shaded range, and the line between them
QUANTILES = (0.05, 0.5, 0.95)
ABOUT = "line: the median over the hidden size, shaded: from its 5th to its 95th percentile"
# the most panels side by side, and inches of one
ACROSS, WIDE, HIGH = 6, 1.9, 1.5


def quantiles(values: Array) -> Array:
    """Return QUANTILES over the last axis, [quantile, ...], with nan where there are no values."""
    return np.quantile(values, QUANTILES, axis=-1)


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
