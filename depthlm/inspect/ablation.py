"""`inspect ablate=`: the change of a run's loss without each edge over depth, and its rank correlation with the weight.

Shapes: r reads (an input of a reader each), n sources.
"""

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.progress import track

from depthlm.errors import UserError
from depthlm.files import read_record, write_record
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
from depthlm.runs.plots import grid, subplots

Mode = Literal["edges", "sources", "tokens"]
# the interventions of each mode, with the titles of their panels
HOWS = {
    "edges": {"zero": "without the edge"},
    "sources": {"zero": "without the source"},
    "tokens": {"mean": "with its weight's mean over tokens", "permuted": "with its weight permuted over tokens"},
}
WITH_EDGES = (
    "attention_residuals, attention_residuals_recency, backout, dca and the GRNs, denseformer, depth_attention, "
    "depth_qkv, embedding_skip, hyper_connections, laurel (pa), mhc, moda, mrla, mudd, uniform_mix, unet_skip, "
    "value_residual"
)
INPUTS = ("q", "k", "v", "residual")
# seconds between writes of what is finished
SAVE_EVERY = 5.0
# changes below this share of the largest one have a linear colour scale
LINEAR = 1e-3


class Finished:
    """The summed losses of finished interventions, [how, batch, set], in a file from which a later call continues.

    key: what the losses depend on; a file with another key, or a damaged one, is ignored.
    """

    def __init__(self, file: Path | None, key: dict[str, Any], shape: tuple[int, ...]) -> None:
        self.file, self.key, self.saved_at = file, {**key, "shape": [*shape]}, time.monotonic()
        self.sums = np.full(shape, np.nan)
        content = read_record(file) if file is not None else None
        if content is not None and content.get("key") == self.key:
            self.sums = np.array(content["sums"], dtype=float)

    def save(self, every: float = 0.0) -> None:
        """Write the file, unless it was written less than `every` seconds ago."""
        if self.file is not None and time.monotonic() - self.saved_at >= every:
            write_record(self.file, {"key": self.key, "sums": self.sums.tolist()})
            self.saved_at = time.monotonic()


def measure(
    model: Decoder,
    batches: Sequence[Batch],
    reads: Reads,
    sets: Sequence[Sequence[Edge]],
    hows: Sequence[str],
    finished: Finished,
    renormalize: bool = True,
) -> Array:
    """Return the loss of all batches with each set of edges changed, summed in nats, as [how, set]."""
    todo = [
        (number, how, part)
        for number, batch in enumerate(batches)
        for how in range(len(hows))
        for part in chunks(sets, batch)
        if np.isnan(finished.sums[how, number, part.start : part.stop]).any()
    ]
    started: tuple[int, dict] = (-1, {})
    try:
        for number, how, part in track(todo, f"{len(sets)} interventions", transient=True):
            if started[0] != number:
                started = number, prefixes(model, batches[number], reads)
            chosen = [sets[index] for index in part]
            edit = Intervention(reads, chosen, hows[how], renormalize)
            after = started[1][first_layer(chosen)]
            finished.sums[how, number, part.start : part.stop] = losses(
                model, batches[number], edit, len(chosen), after
            )
            finished.save(SAVE_EVERY)
    finally:
        finished.save()
    return finished.sums.sum(1)


def sets_of(reads: Reads, mode: Mode) -> dict[Any, list[Edge]]:
    """Return which edges each intervention changes: one, or all with a source in any reader of one mechanism.

    The keys of the latter are the kind of the mechanism, as `kind_of` returns it, and the number of the source.
    """
    edges = reads.all_edges()
    if mode != "sources":
        return {edge: [edge] for edge in edges}
    sets: dict[Any, list[Edge]] = {}
    for edge in edges:
        sets.setdefault((kind_of(edge), reads.source(edge)), []).append(edge)
    return dict(sorted(sets.items()))


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


def ablate(
    model: Decoder,
    batches: Sequence[Batch],
    mode: Mode,
    renormalize: bool = True,
    file: Path | None = None,
    key: dict[str, Any] | None = None,
) -> tuple[list[Picture], list[str]]:
    """Return the pictures of an ablation, and its results in lines.

    file: where finished interventions are kept. key: what their losses depend on besides the arguments.
    Raises UserError if the decoder has no edges over depth, or with mode=tokens if their weights do not depend on them.
    """
    reads, baselines = record(model, batches)
    mechanisms = names(model)
    if not reads.edges:
        raise UserError(
            f"ablate={mode}: {' with '.join(mechanisms.values())} has no weights of sources that can be changed; those "
            f"with such weights: {WITH_EDGES}"
        )
    if mode == "tokens" and not reads.vary:
        raise UserError(
            f"ablate={mode}: the weights of this model do not depend on tokens; use ablate=edges or sources"
        )
    sets, hows = sets_of(reads, mode), HOWS[mode]
    key = {**(key or {}), "mode": mode, "renormalize": renormalize, "sets": [str(name) for name in sets]}
    finished = Finished(file, key, (len(hows), len(batches), len(sets)))
    tokens = sum(int((targets != -100).sum()) for _, targets in batches)
    totals = measure(model, batches, reads, [*sets.values()], [*hows], finished, renormalize)
    changes = dict(zip(hows, (totals - baselines.sum()) / tokens, strict=True))
    lines = [f"loss {baselines.sum() / tokens:.4f} nats per token, {len(sets)} interventions of ablate={mode}"]
    pictures = []
    for kind, mechanism in mechanisms.items():
        chosen = [number for number, edges in enumerate(sets.values()) if kind_of(edges[0]) == kind]
        if not chosen:
            continue
        of_kind = [[*sets.values()][number] for number in chosen]
        values = {how: change[chosen] for how, change in changes.items()}
        make = source_picture if mode == "sources" else edge_picture
        picture, line = make(reads, of_kind, values, f"{mechanism}_ablation_{mode}", hows)
        pictures.append(picture)
        lines.append(f"{mechanism}: {line}")
    return pictures, lines


def edge_picture(
    reads: Reads, sets: Sequence[Sequence[Edge]], values: dict[str, Array], name: str, titles: dict[str, str]
) -> tuple[Picture, str]:
    """Return the picture of edges, and a line with the rank correlations and the edges with the largest changes."""
    edges = [edge for (edge,) in sets]
    rows = list(dict.fromkeys((edge.reader, edge.panel) for edge in edges))
    panels = {reader: len(reads.weights_pn(reader)) for reader, _ in rows}
    labels = [label(reader.kind, reader.layer, panel, panels[reader]) for reader, panel in rows]
    place = tuple(zip(*((rows.index(edge[:2]), reads.source(edge)) for edge in edges), strict=True))
    weights = np.array([reads.weights_pn(edge.reader)[edge.panel, edge.place] for edge in edges])
    shape = len(rows), 1 + max(place[1])
    arrays, lines, shown = {f"{name}_rows": np.array(labels)}, [], dict[str, Array]()
    maps_streams = reads.edges[edges[0].reader].maps_streams
    for part, values_of_part in {"weight": weights, **values}.items():
        matrix = np.full(shape, np.nan)
        matrix[place] = values_of_part
        arrays[f"{name}_{'change' if part == 'zero' else part}"] = matrix
        shown[part] = matrix
    # the weight of an only source is fixed, unless it is a map
    free = np.isfinite(shown["weight"]).sum(1)[list(place[0])] > (0 if maps_streams else 1)
    heads = {"weight": "distance of H_res from the identity" if maps_streams else "weight, mean over tokens"}
    for how, change in values.items():
        rank = correlation(np.abs(weights[free]), change[free])
        arrays[f"{name}_{'change' if how == 'zero' else how}_rank_correlation"] = np.array(rank)
        what = "with the identity as H_res" if how == "zero" and maps_streams else titles[how]
        heads[how] = f"change of loss {what}\nrank correlation with |weight|: {rank:.2f}"
        extremes = []
        for number in (int(change.argmax()), int(change.argmin())):
            source = "" if maps_streams else f" from source {reads.source(edges[number])}"
            extremes.append(f"{labels[rows.index(edges[number][:2])]}{source} ({change[number]:+.3g})")
        lines.append(
            f"{what}, the loss changes most for {extremes[0]} and least for {extremes[1]}; rank correlation with "
            f"|weight|: {rank:.2f}, over {free.sum()} edges"
        )
    panels_shown = {heads[part]: matrix for part, matrix in shown.items()}
    about = "weights over depth, and the change of the loss when each of them is changed"
    draw = partial(draw_edges, panels_shown, labels, f"{name.partition('_ablation')[0]}: {about}")
    return Picture(name, about, arrays, draw), "; ".join(lines)


def source_picture(
    reads: Reads, sets: Sequence[Sequence[Edge]], values: dict[str, Array], name: str, titles: dict[str, str]
) -> tuple[Picture, str]:
    """Return the picture of sources that are removed from all readers, and a line with the most useful one."""
    (change,), numbers = values.values(), np.array([reads.source(edges[0]) for edges in sets])
    arrays = {f"{name}_sources": numbers, f"{name}_change": change}
    about = "the change of the loss when a source is removed from all readers"
    line = (
        f"{titles['zero']} in all readers, the loss changes most for source {numbers[change.argmax()]} "
        f"({change.max():+.3g}) and least for source {numbers[change.argmin()]} ({change.min():+.3g})"
    )
    if reads.edges[sets[0][0].reader].maps_streams:
        line = f"with the identity as H_res of all sublayers, the loss changes by {change[0]:+.3g}"
    heading = f"{name.partition('_ablation')[0]}: {about}"
    return Picture(name, about, arrays, partial(draw_sources, numbers, change, heading)), line


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


def draw_sources(numbers: Array, change: Array, heading: str) -> Any:
    """Draw the change of the loss without each source."""
    figure, axes = subplots(1, max(4.0, 0.3 * len(numbers) + 1.5), 3.4)
    axes[0, 0].bar(numbers, change, color="#0072B2")
    axes[0, 0].axhline(0, color="black", lw=0.6)
    axes[0, 0].xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set_ylabel("change of loss, nats per token")
    grid(axes[0, 0])
    write_labels(figure, heading, "source")
    return figure
