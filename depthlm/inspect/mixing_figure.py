"""The figure of depth mixing matrices, on one colour scale."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from depthlm.inspect.figures import NOTHING, Grid, draw_grid
from depthlm.inspect.picture import Array
from depthlm.report.figures.style import subplots

# panels side by side, and labels of an axis
ACROSS, LABELS = 3, 14


def draw_mixing(matrices: Sequence[tuple[str, Array]]) -> Any:
    """Draw matrices [input, output] with their titles."""
    across = min(ACROSS, len(matrices))
    down = -(-len(matrices) // across)
    side = float(np.clip(0.24 * max(len(matrix) for _, matrix in matrices), 2.4, 5.0))
    alike = len({len(matrix) for _, matrix in matrices}) == 1
    figure, axes = subplots(across, side * across + 2.2, (side + 0.35) * down + 1.2, rows=down)
    norm, colours = mixing_scale(np.concatenate([matrix.ravel() for _, matrix in matrices]))
    for number, (place, (title, matrix)) in enumerate(zip(axes.flat, matrices, strict=False)):
        image = draw_grid(place, Grid(title, matrix, last_row="final read"), norm, colours)
        label_axes(place, len(matrix))
        # labels that are the same as those of a panel beside or below it
        place.tick_params(
            labelleft=not alike or number % across == 0, labelbottom=not alike or number + across >= len(matrices)
        )
    for place in axes.flat[len(matrices) :]:
        place.set_visible(False)
    figure.supylabel("input of", fontsize="medium")
    figure.supxlabel("output of", fontsize="medium")
    figure.suptitle("Depth mixing: the weight of each output in each input", fontsize="medium")
    figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02, label="weight, mean over tokens")
    return figure


def mixing_scale(values: Array) -> tuple[Any, Any]:
    """Return a norm and a colour map from 0 to the largest weight, or symmetric around 0 if there are negative ones.

    The scale is that of the square root: the weights of a softmax over depth are small where those of sums are near 1.
    """
    import matplotlib
    from matplotlib.colors import FuncNorm

    finite = values[np.isfinite(values)]
    most = float(np.abs(finite).max()) or 1.0
    signed = bool((finite < 0).any())
    colours = matplotlib.colormaps["PuOr_r" if signed else "viridis_r"].with_extremes(bad=NOTHING)
    return FuncNorm((signed_root, signed_square), -most if signed else 0.0, most), colours


def signed_root(x: Array) -> Array:
    return np.sign(x) * np.sqrt(np.abs(x))


def signed_square(x: Array) -> Array:
    return np.sign(x) * np.square(x)


def label_axes(axes: Any, rows: int) -> None:
    """Label the sources and the rows of a matrix by sublayer."""
    kinds = ("attention", "MLP")
    sublayers = [f"layer {sublayer // 2} {kinds[sublayer % 2]}" for sublayer in range(rows - 1)]
    # an even step labels sublayers of one kind
    step = 1 if rows <= LABELS else 2 * -(-rows // (2 * LABELS))
    sources, inputs = ["embedding", *sublayers], [*sublayers, "final read"]
    axes.set_xticks(range(0, rows, step), sources[::step], size=7, rotation=90)
    shown = [*range(0, rows - step, step), rows - 1]
    axes.set_yticks(shown, [inputs[row] for row in shown], size=7)
