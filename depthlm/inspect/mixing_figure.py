"""The figure of depth mixing matrices, on one colour scale."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from depthlm.inspect.figures import Grid, draw_grid, scale, write_labels
from depthlm.inspect.picture import Array
from depthlm.report.figures.style import subplots

# panels side by side, and labels of an axis
ACROSS, LABELS = 3, 14


def draw_mixing(matrices: Sequence[tuple[str, Array]]) -> Any:
    """Draw matrices [input, output] with their titles, on a scale of the square root."""
    from matplotlib.colors import FuncNorm

    across = min(ACROSS, len(matrices))
    down = -(-len(matrices) // across)
    side = float(np.clip(0.24 * max(len(matrix) for _, matrix in matrices), 2.4, 5.0))
    alike = len({len(matrix) for _, matrix in matrices}) == 1
    figure, axes = subplots(across, side * across + 2.2, (side + 0.35) * down + 1.2, rows=down)
    linear, colours = scale([np.concatenate([matrix.ravel() for _, matrix in matrices])[None]])
    # the weights of a softmax over depth are small where those of sums are near 1
    norm = FuncNorm((signed_root, signed_square), linear.vmin, linear.vmax)
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
    write_labels(figure, "Depth mixing: the weight of each output in each input", "output of")
    figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02, label="weight, mean over tokens")
    return figure


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
