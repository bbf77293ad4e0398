"""The magnitudes of outputs and gradients over training (Attention Residuals, arXiv 2603.15031, Figure 5 b and c)."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from depthlm.inspect.picture import Array, Picture
from depthlm.report.figures.style import grid, subplots
from depthlm.run_directory import RunDirectory
from depthlm.runs.records import read_metrics

TITLES = {
    "attention_output": "output of the attention",
    "mlp_output": "output of the MLP",
    "attention_gradient": "gradient at the attention's output",
    "mlp_gradient": "gradient at the MLP's output",
}
PARTS = tuple(TITLES)
# steps per panel: with more, the curves are hard to distinguish
CURVES = 8


def block_picture(directory: Path) -> Picture | None:
    """Return the picture of a run's blocks.jsonl; None if the file is missing or empty."""
    rows = list(read_metrics(RunDirectory(directory).sublayer_norms, {"step"}, PARTS))
    if not rows:
        return None
    steps = np.array([row["step"] for row in rows])
    # non-finite values are null in the file, and nan here
    arrays = {f"blocks_{part}": np.array([row[part] for row in rows], dtype=float) for part in PARTS}
    about = "size of outputs and gradients by layer, over training (Figure 5 of arXiv 2603.15031)"
    return Picture("blocks", about, {"blocks_step": steps, **arrays}, partial(draw_blocks, steps, arrays))


def draw_blocks(steps: Array, arrays: dict[str, Array]) -> Any:
    """Draw outputs and gradients over layers in separate panels for attention and MLP, with one curve per step."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    figure, axes = subplots(2, 10.5, 6.6, rows=2, sharex=True, sharey="row")
    # the palest colours are invisible on white
    colours = ListedColormap(matplotlib.colormaps["viridis_r"](np.linspace(0.1, 1, 256)))
    norm = Normalize(steps[0], max(steps[-1], steps[0] + 1))
    shown = sorted({int(np.abs(steps - step).argmin()) for step in np.linspace(steps[0], steps[-1], CURVES)})
    for place, part in zip(axes.flat, PARTS, strict=True):
        values = arrays[f"blocks_{part}"]
        for number in shown:
            place.plot(values[number], color=colours(norm(steps[number])), marker="o", ms=3, lw=1.3)
        positive = values[shown][values[shown] > 0]
        if positive.size:
            place.set_yscale("log")
        place.xaxis.get_major_locator().set_params(integer=True)
        place.set_title(TITLES[part], fontsize="medium")
        grid(place)
    for place, label in zip(axes[:, 0], ("output, root mean square", "gradient, root mean square"), strict=True):
        place.set_ylabel(label)
    figure.supxlabel("layer", fontsize="medium")
    figure.suptitle("Outputs of the sublayers, and the gradient of the loss there", fontsize="medium")
    figure.colorbar(ScalarMappable(norm, colours), ax=axes, shrink=0.85, pad=0.02, label="step")
    return figure
