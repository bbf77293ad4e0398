"""The load of experts, and the entropy and biases of their routers, over training."""

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from depthlm.inspect.picture import Array, Picture
from depthlm.report.figures.style import grid, subplots
from depthlm.run_directory import RunDirectory
from depthlm.runs.records import read_metrics

KEYS = ("step", "load", "entropy", "bias")


def expert_picture(directory: Path) -> Picture | None:
    """Return the picture of a run's experts.jsonl; None if the file is missing or empty."""
    rows: list[list[Array]] = []
    for row in read_metrics(RunDirectory(directory).experts, {"step"}):
        # rows of other shapes are damaged
        with suppress(KeyError, TypeError, ValueError):
            values = [np.array(row[key], dtype=float) for key in KEYS]
            shapes = [value.shape for value in values]
            if len(shapes[1]) == 2 and shapes[2] == shapes[1][:1] and shapes[3] in (shapes[1], (0,)):
                rows += [values] if not rows or shapes == [value.shape for value in rows[0]] else []
    if not rows:
        return None
    arrays = {f"experts_{key}": np.array(values) for key, values in zip(KEYS, zip(*rows, strict=True), strict=True)}
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
