"""Interventions on a trained decoder: its loss when the weights of some edges over depth are changed.

`inspect ablate=edges` removes each edge, and compares the change of the loss with the weight.

The decoder itself computes the loss, with the edited weights in the reads of these edges alone. A forward pass begins
at the first layer that an intervention affects, from what that layer gets in the unchanged decoder, and it contains
several copies of a batch, each with an intervention of its own.

Shapes: i interventions of a pass, b batch, t tokens, p inputs of a reader, n sources.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.progress import track
from torch import Tensor
from torch.utils._pytree import tree_map

from depthlm.errors import UserError
from depthlm.inspect.picture import Array, Grid, Means, Picture, draw_grid, number_text, scale, write_labels
from depthlm.model import Decoder, Observer
from depthlm.model.attention import attention_class
from depthlm.model.attention.self_attention import DepthKV
from depthlm.model.connection import State
from depthlm.model.decoder import Prefix
from depthlm.model.edges import Edges, Edit, Reader, align_axes, replace_weights
from depthlm.ops.moda.bank import Depth
from depthlm.runs.plots import subplots

# inputs and targets, x_bt each
Batch = tuple[Tensor, Tensor]
# tokens per forward pass, over all copies of a batch
PASS = 8192
WITH_EDGES = (
    "attention_residuals, attention_residuals_recency, backout, dca and the GRNs, denseformer, depth_attention, "
    "depth_qkv, embedding_skip, hyper_connections, laurel (pa), mhc, moda, mrla, mudd, uniform_mix, unet_skip, "
    "value_residual"
)
INPUTS = ("q", "k", "v", "residual")
# changes below this share of the largest one have a linear colour scale
LINEAR = 1e-3


class Edge(NamedTuple):
    """An edge: a source of an input of a reader. place: of the source among the weights of the read."""

    reader: Reader
    panel: int
    place: int


class Reads:
    """The edges of a decoder, with means of their weights: an edit that records the weights and returns them.

    before: an edit that the weights have already. edges, means: by reader; means have one entry for batch and tokens.
    """

    def __init__(self, before: Edit | None = None) -> None:
        self.before = before
        self.edges: dict[Reader, Edges] = {}
        self.means = Means()

    def __call__(self, reader: Reader, weights: Tensor, edges: Edges) -> Tensor:
        """Record weights, and return them."""
        weights = weights if self.before is None else self.before(reader, weights, edges)
        axes = [edges.axes.index(axis) for axis in ("batch", "token")]
        tokens = weights.shape[axes[0]] * weights.shape[axes[1]]
        self.edges[reader] = edges
        self.means.add(reader, weights.double().mean(axes, keepdim=True), tokens)
        return weights

    def weights_pn(self, reader: Reader) -> Array:
        """Return the mean weight of each source in each input, or the distance of H_res from the identity."""
        mean, axes = self.means[reader], self.edges[reader].axes
        if self.edges[reader].maps_streams:
            return (mean - torch.eye(mean.shape[-1]).to(mean)).norm().view(1, 1).cpu().numpy()
        rest = [number for number, axis in enumerate(axes) if axis not in ("panel", "source")]
        mean = mean.mean(rest)
        if "panel" not in axes:
            mean = mean[None]
        elif axes.index("panel") > axes.index("source"):
            mean = mean.T
        return mean.cpu().numpy()

    def all_edges(self) -> list[Edge]:
        """Return all edges, in the order of layers."""
        ordered = sorted(self.edges, key=lambda reader: reader.layer)
        return [
            Edge(reader, panel, place)
            for reader in ordered
            for panel in range(len(self.weights_pn(reader)))
            for place, source in enumerate(self.edges[reader].sources)
            if source >= 0
        ]

    def source(self, edge: Edge) -> int:
        """Return the number of the source of an edge."""
        return self.edges[edge.reader].sources[edge.place]


class Intervention:
    """Changes the weights of some edges: one set of edges for each copy of a batch.

    how: zero; mean: over all tokens. renormalize: whether the other weights keep the sum of a softmax if weights are
    set to zero.
    """

    def __init__(self, reads: Reads, sets: Sequence[Sequence[Edge]], how: str, renormalize: bool = True) -> None:
        self.reads, self.sets, self.how, self.renormalize = reads, sets, how, renormalize
        self.readers = {edge.reader for edges in sets for edge in edges}

    def __call__(self, reader: Reader, weights: Tensor, edges: Edges) -> Tensor:
        """Return the weights with those of the edges changed."""
        if self.reads.before is not None:
            weights = self.reads.before(reader, weights, edges)
        if reader not in self.readers:
            return weights
        batch = edges.axes.index("batch")
        panels = weights.shape[edges.axes.index("panel")] if "panel" in edges.axes else 1
        kept_ipn = torch.ones(len(self.sets), panels, len(edges.sources), dtype=torch.bool)
        for number, edge in ((i, edge) for i, of_copy in enumerate(self.sets) for edge in of_copy):
            if edge.reader == reader:
                kept_ipn[number, edge.panel, edge.place] = False
        rows = kept_ipn.repeat_interleave(weights.shape[batch] // len(self.sets), 0).to(weights.device)
        kept = align_axes(rows, ("batch", "panel", "source"), edges.axes)
        other = self.reads.means[reader].to(weights) if self.how == "mean" else None
        return replace_weights(weights, edges._replace(normalized=edges.normalized and self.renormalize), kept, other)


class Prefixes(Observer):
    """Collects what each layer gets, by its position."""

    def __init__(self) -> None:
        self.at: dict[int, Prefix] = {}

    def layer(self, position: int, state: State, depth: DepthKV) -> None:
        self.at[position] = Prefix(position, state, depth)


def repeat_prefix(prefix: Prefix, copies: int) -> Prefix:
    """Return a prefix for several copies of its batch, which is the first axis of each tensor."""

    def repeat(x: object) -> object:
        if isinstance(x, Depth):
            return x.repeat(copies)
        return x.repeat(copies, *[1] * (x.ndim - 1)) if isinstance(x, Tensor) else x

    return Prefix(prefix.position, *(tree_map(repeat, part) for part in prefix[1:]))


@contextmanager
def edited(model: Decoder, edit: Edit) -> Iterator[None]:
    """Let an edit change the weights of all reads over depth within this context."""
    before = model.connections[0].edit
    model.edit_edges(edit)
    try:
        yield
    finally:
        model.edit_edges(before)


@torch.no_grad()
def losses(model: Decoder, batch: Batch, edit: Edit, copies: int = 1, after: Prefix | None = None) -> Array:
    """Return the summed negative log-likelihood of each copy of a batch, in nats. after: begin there."""
    inputs_bt, targets_bt = (x.repeat(copies, 1) for x in batch)
    with edited(model, edit):
        hidden_btd = model.hidden(inputs_bt, after=None if after is None else repeat_prefix(after, copies))
    nll, _ = model.losses(hidden_btd, targets_bt, fused=False)
    return nll.double().where(targets_bt.flatten() != -100, 0).view(copies, -1).sum(1).cpu().numpy()


@torch.no_grad()
def prefixes(model: Decoder, batch: Batch, edit: Edit) -> dict[int, Prefix]:
    """Return the prefix before each layer with an edit, by its position."""
    collected = Prefixes()
    with edited(model, edit):
        model.hidden(batch[0], observer=collected)
    return collected.at


def record(model: Decoder, batches: Sequence[Batch]) -> tuple[Reads, Array]:
    """Return the edges of a decoder, and the summed loss of each batch without an intervention."""
    reads = Reads()
    return reads, np.array([losses(model, batch, reads)[0] for batch in batches])


def chunks(sets: Sequence[object], batch: Batch) -> Iterator[range]:
    """Yield which interventions share a pass."""
    size = max(1, PASS // batch[0].numel())
    for first in range(0, len(sets), size):
        yield range(first, min(first + size, len(sets)))


def ablate(model: Decoder, batches: Sequence[Batch], renormalize: bool = True) -> tuple[list[Picture], list[str]]:
    """Return the pictures of an ablation, and its results in lines.

    renormalize: whether the other weights of a softmax are renormalized. Raises UserError if the decoder has no edges
    over depth.
    """
    reads, baselines = record(model, batches)
    classes = type(model.connections[0]), attention_class(layer.attention for layer in model.layers)
    # by their names, which are those of their files
    connection, attention = (mechanism.__module__.rpartition(".")[2] for mechanism in classes)
    if not reads.edges:
        raise UserError(
            f"ablate=edges: {connection} with {attention} has no weights of sources that can be changed; those "
            f"with such weights: {WITH_EDGES}"
        )
    edges = reads.all_edges()
    sums = np.zeros(len(edges))
    for batch in track(batches, f"{len(edges)} edges", transient=True):
        starts = prefixes(model, batch, reads)
        for part in chunks(edges, batch):
            sets = [[edges[index]] for index in part]
            start = starts[min(edge.reader.layer for (edge,) in sets)]
            edit = Intervention(reads, sets, "zero", renormalize)
            sums[part.start : part.stop] += losses(model, batch, edit, len(sets), start)
    tokens = sum(int((targets != -100).sum()) for _, targets in batches)
    changes = (sums - baselines.sum()) / tokens
    pictures, lines = [], [f"loss {baselines.sum() / tokens:.4f} nats per token, {len(edges)} edges"]
    for mechanism, of_attention in ((connection, False), (attention, True)):
        chosen = [number for number, edge in enumerate(edges) if (edge.reader.kind == "layer") == of_attention]
        if chosen:
            of_kind = [edges[number] for number in chosen]
            picture, line = edge_picture(reads, of_kind, changes[chosen], f"{mechanism}_ablation_edges")
            pictures.append(picture)
            lines.append(f"{mechanism}: {line}")
    return pictures, lines


def edge_picture(reads: Reads, edges: Sequence[Edge], change: Array, name: str) -> tuple[Picture, str]:
    """Return the picture of edges, and a line with the rank correlation."""
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
    line = f"rank correlation of |weight| and the change of the loss {what}: {rank:.2f}, over {free.sum()} edges"
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
            norm, colours = SymLogNorm(LINEAR * most, vmin=-most, vmax=most), scale([np.array([[-1.0, 1.0]])])[1]
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
