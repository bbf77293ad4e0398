"""`inspect ablate=edges`: the change of the loss without each edge over depth, and its correlation with the weight.

Shapes: r reads (an input of a reader each), n sources.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.progress import track

from depthlm.errors import UserError
from depthlm.inspect.interventions import (
    Batch,
    Edge,
    Intervention,
    Reads,
    chunks,
    first_layer,
    losses,
    prefixes,
    record,
)
from depthlm.inspect.picture import Array, Grid, Picture, draw_grid, number_text, scale, write_labels
from depthlm.model import Decoder
from depthlm.model.attention import attention_class
from depthlm.runs.plots import subplots

WITH_EDGES = (
    "attention_residuals, attention_residuals_recency, backout, dca and the GRNs, denseformer, depth_attention, "
    "depth_qkv, embedding_skip, hyper_connections, laurel (pa), mhc, moda, mrla, mudd, uniform_mix, unet_skip, "
    "value_residual"
)
INPUTS = ("q", "k", "v", "residual")
# changes below this share of the largest one have a linear colour scale
LINEAR = 1e-3


def measure(
    model: Decoder, batches: Sequence[Batch], reads: Reads, edges: Sequence[Edge], renormalize: bool = True
) -> Array:
    """Return the loss of all batches without each edge, summed in nats, as [edge]."""
    sums = np.zeros(len(edges))
    for batch in track(batches, f"{len(edges)} edges", transient=True):
        starts = prefixes(model, batch, reads)
        for part in chunks(edges, batch):
            sets = [[edges[index]] for index in part]
            edit = Intervention(reads, sets, "zero", renormalize)
            sums[part.start : part.stop] += losses(model, batch, edit, len(sets), starts[first_layer(sets)])
    return sums


def kind_of(edge: Edge) -> str:
    """Return whether an edge belongs to the connection or to the attention."""
    return "attention" if edge.reader.kind == "layer" else "connection"


def names(model: Decoder) -> dict[str, str]:
    """Return the names of the two mechanisms of a decoder, which are those of their files."""
    classes = {
        "connection": type(model.connections[0]),
        "attention": attention_class(layer.attention for layer in model.layers),
    }
    return {kind: found.__module__.rpartition(".")[2] for kind, found in classes.items()}


def ablate(model: Decoder, batches: Sequence[Batch], renormalize: bool = True) -> tuple[list[Picture], list[str]]:
    """Return the pictures of an ablation, and its results in lines.

    renormalize: whether the other weights of a softmax are renormalized. Raises UserError if the decoder has no edges
    over depth.
    """
    reads, baselines = record(model, batches)
    mechanisms = names(model)
    if not reads.edges:
        raise UserError(
            f"ablate=edges: {' with '.join(mechanisms.values())} has no weights of sources that can be changed; those "
            f"with such weights: {WITH_EDGES}"
        )
    edges = reads.all_edges()
    tokens = sum(int((targets != -100).sum()) for _, targets in batches)
    changes = (measure(model, batches, reads, edges, renormalize) - baselines.sum()) / tokens
    pictures, lines = [], [f"loss {baselines.sum() / tokens:.4f} nats per token, {len(edges)} edges"]
    for kind, mechanism in mechanisms.items():
        chosen = [number for number, edge in enumerate(edges) if kind_of(edge) == kind]
        if chosen:
            of_kind = [edges[number] for number in chosen]
            picture, line = edge_picture(reads, of_kind, changes[chosen], f"{mechanism}_ablation_edges")
            pictures.append(picture)
            lines.append(f"{mechanism}: {line}")
    return pictures, lines


def edge_picture(reads: Reads, edges: Sequence[Edge], change: Array, name: str) -> tuple[Picture, str]:
    """Return the picture of edges, and a line with the rank correlation and the edges with the largest changes."""
    rows = list(dict.fromkeys((edge.reader, edge.panel) for edge in edges))
    panels = {reader: len(reads.weights_pn(reader)) for reader, _ in rows}
    labels = [label(reader.kind, reader.layer, panel, panels[reader]) for reader, panel in rows]
    place = tuple(zip(*((rows.index(edge[:2]), reads.source(edge)) for edge in edges), strict=True))
    weights = np.array([reads.weights_pn(edge.reader)[edge.panel, edge.place] for edge in edges])
    weight_rn, change_rn = (np.full((len(rows), 1 + max(place[1])), np.nan) for _ in range(2))
    weight_rn[place], change_rn[place] = weights, change
    maps_streams = reads.edges[edges[0].reader].maps_streams
    # the weight of an only source is fixed, unless it is a map
    free = np.isfinite(weight_rn).sum(1)[list(place[0])] > (0 if maps_streams else 1)
    rank = correlation(np.abs(weights[free]), change[free])
    arrays = {"rows": np.array(labels), "weight": weight_rn, "change": change_rn}
    arrays["change_rank_correlation"] = np.array(rank)
    what = "with the identity as H_res" if maps_streams else "without the edge"
    extremes = []
    for number in (int(change.argmax()), int(change.argmin())):
        source = "" if maps_streams else f" from source {reads.source(edges[number])}"
        extremes.append(f"{labels[rows.index(edges[number][:2])]}{source} ({change[number]:+.3g})")
    line = (
        f"{what}, the loss changes most for {extremes[0]} and least for {extremes[1]}; rank correlation with "
        f"|weight|: {rank:.2f}, over {free.sum()} edges"
    )
    shown = {
        "distance of H_res from the identity" if maps_streams else "weight, mean over tokens": weight_rn,
        f"change of loss {what}\nrank correlation with |weight|: {rank:.2f}": change_rn,
    }
    about = "weights over depth, and the change of the loss without each of them"
    draw = partial(draw_edges, shown, labels, f"{name.partition('_ablation')[0]}: {about}")
    return Picture(name, about, {f"{name}_{part}": array for part, array in arrays.items()}, draw), line


def correlation(first: Array, second: Array) -> float:
    """Return Spearman's rank correlation; nan for fewer than three values, or if all values of one are equal."""
    from scipy.stats import spearmanr

    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    return float(spearmanr(first, second).statistic)


def label(kind: str, layer: int, panel: int = 0, panels: int = 1) -> str:
    """Return the name of a read in a figure."""
    title = {"final": "final read", "attention": f"layer {layer} attention", "mlp": f"layer {layer} MLP"}
    return f"{title.get(kind, f'layer {layer}')}{f', {INPUTS[panel]}' if panels > 1 else ''}"


def draw_edges(panels: dict[str, Array], rows: Sequence[str], heading: str) -> Any:
    """Draw the weights and the changes of the loss [read, source] side by side, each on its own colour scale."""
    from matplotlib.colors import SymLogNorm

    height, width = next(iter(panels.values())).shape
    wide, high = max(3.4, min(0.5 * width, 8.0) + 1.4), max(2.0, min(0.32 * height, 12.0)) + 1.3
    figure, axes = subplots(len(panels), wide * len(panels) + 1.0, high, sharey=True)
    for number, (place, (title, matrix)) in enumerate(zip(axes[0], panels.items(), strict=True)):
        norm, colours, shown, unit = *scale([matrix]), matrix, ""
        if number:
            most = float(np.nanmax(np.abs(matrix))) or 1.0
            thousands = 3 * math.floor(math.log10(most) / 3)
            shown, most = matrix / 10.0**thousands, most / 10.0**thousands
            unit = f"$10^{{{thousands}}}$ nats per token" if thousands else "nats per token"
            # a few edges matter a thousand times as much as the others
            norm, colours = SymLogNorm(LINEAR * most, vmin=-most, vmax=most), signed_colours()
        image = draw_grid(place, Grid(title, shown, rows=rows), norm, colours)
        step = -(-height // 40)
        place.set_yticks(range(0, height, step), rows[::step], size=7)
        if width == 1:
            place.set_xticks([])
        bar = figure.colorbar(image, ax=place, shrink=0.85, pad=0.02, label=unit)
        if number:
            decades = [sign * most * LINEAR**share for sign in (-1, 1) for share in (0, 1 / 3, 2 / 3)]
            bar.set_ticks([*decades, 0], labels=[number_text(tick) for tick in (*decades, 0)])
            bar.minorticks_off()
    write_labels(figure, heading, "source" if width > 1 else "")
    return figure


def signed_colours() -> Any:
    """Return the colour map of values of both signs."""
    return scale([np.array([[-1.0, 1.0]])])[1]
