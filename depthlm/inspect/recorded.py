"""What a run recorded in training: the sizes of outputs and gradients, and the load of its experts."""

from contextlib import suppress
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
EXPERT_KEYS = ("step", "load", "entropy", "bias")
# steps per panel: with more, the curves are hard to distinguish
CURVES = 8


def sublayer_norm_picture(directory: Path) -> Picture | None:
    """Return the picture of a run's sublayer norms, from blocks.jsonl; None if the file is missing or empty."""
    rows = list(read_metrics(RunDirectory(directory).sublayer_norms, {"step"}, PARTS))
    if not rows:
        return None
    steps = np.array([row["step"] for row in rows])
    # non-finite values are null in the file, and nan here
    arrays = {f"blocks_{part}": np.array([row[part] for row in rows], dtype=float) for part in PARTS}
    about = "size of outputs and gradients by layer, over training (Figure 5 of arXiv 2603.15031)"
    return Picture("blocks", about, {"blocks_step": steps, **arrays}, partial(draw_sublayer_norms, steps, arrays))


def draw_sublayer_norms(steps: Array, arrays: dict[str, Array]) -> Any:
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


def expert_picture(directory: Path) -> Picture | None:
    """Return the picture of a run's experts.jsonl; None if the file is missing or empty."""
    rows: list[list[Array]] = []
    for row in read_metrics(RunDirectory(directory).experts, {"step"}):
        # rows of other shapes are damaged
        with suppress(KeyError, TypeError, ValueError):
            values = [np.array(row[key], dtype=float) for key in EXPERT_KEYS]
            shapes = [value.shape for value in values]
            if len(shapes[1]) == 2 and shapes[2] == shapes[1][:1] and shapes[3] in (shapes[1], (0,)):
                rows += [values] if not rows or shapes == [value.shape for value in rows[0]] else []
    if not rows:
        return None
    arrays = {
        f"experts_{key}": np.array(values) for key, values in zip(EXPERT_KEYS, zip(*rows, strict=True), strict=True)
    }
    about = "share of each expert in the load of its layer; balance and entropy of the routers over training"
    return Picture("experts", about, arrays, partial(draw_experts, arrays))


def draw_experts(arrays: dict[str, Array]) -> Any:
    """Draw the load at the last logged step, and the largest load, entropy and bias of each layer over training."""
    steps, load, entropy = (arrays[f"experts_{key}"] for key in ("step", "load", "entropy"))
    layers, experts = load.shape[1:]
    figure, axes = subplots(2, 10.5, 6.4, rows=2)
    image = axes[0, 0].imshow(load[-1] * experts, cmap="Blues", vmin=0, aspect="auto", interpolation="nearest")
    axes[0, 0].set(xlabel="expert", ylabel="layer with experts")
    axes[0, 0].set_title(f"load at step {steps[-1]:,.0f}, 1 if all are equal", fontsize="medium")
    figure.colorbar(image, ax=axes[0, 0])
    biases = np.abs(arrays["experts_bias"])
    panels = [
        (axes[0, 1], (load * experts).max(-1), "load of the busiest expert"),
        (axes[1, 0], entropy, f"entropy of the router in nats, at most {np.log(experts):.2f}"),
        (axes[1, 1], biases.max(-1) if biases.size else None, "largest absolute bias of the router"),
    ]
    for place, values, title in panels:
        place.set_title(title, fontsize="medium")
        place.set_xlabel("step")
        grid(place)
        if values is None:
            place.text(0.5, 0.5, "these routers have no bias", ha="center", va="center", transform=place.transAxes)
            continue
        for layer in range(layers):
            label = f"layer {layer}" if layer in (0, layers - 1) else None
            place.plot(steps, values[:, layer], color=_colour(layer, layers), lw=1.3, label=label)
        place.legend(fontsize="small", frameon=False)
    return figure


def _colour(layer: int, layers: int) -> Any:
    import matplotlib

    return matplotlib.colormaps["viridis_r"](0.1 + 0.9 * layer / max(layers - 1, 1))
