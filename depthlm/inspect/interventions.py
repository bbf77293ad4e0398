"""Interventions on a trained decoder: its loss when the weights of some edges over depth are changed.

The decoder itself computes the loss, with the edited weights in the reads of these edges alone. A forward pass begins
at the first layer that an intervention affects, from what that layer gets in the unchanged decoder, and it contains
several copies of a batch, each with an intervention of its own.

Shapes: i interventions of a pass, b batch, t tokens, p inputs of a reader, n sources.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from depthlm.inspect.picture import Array
from depthlm.model import Decoder, Observer
from depthlm.model.attention.self_attention import DepthKV
from depthlm.model.connection import State
from depthlm.model.decoder import Prefix
from depthlm.model.edges import Edges, Edit, Reader, align_axes, replace_weights
from depthlm.ops.moda.bank import Depth

# inputs and targets, x_bt each
Batch = tuple[Tensor, Tensor]
# tokens per forward pass, over all copies of a batch
PASS = 8192


class Edge(NamedTuple):
    """An edge: a source of an input of a reader. place: of the source among the weights of the read."""

    reader: Reader
    panel: int
    place: int


class Reads:
    """The edges of a decoder, with means of their weights: an edit that records the weights and returns them.

    before: an edit that the weights have already. edges: by reader.
    """

    def __init__(self, before: Edit | None = None) -> None:
        self.before = before
        self.edges: dict[Reader, Edges] = {}
        self.sums: dict[Reader, Tensor] = {}
        self.tokens: dict[Reader, int] = {}

    def __call__(self, reader: Reader, weights: Tensor, edges: Edges) -> Tensor:
        """Record weights, and return them."""
        weights = weights if self.before is None else self.before(reader, weights, edges)
        axes = [edges.axes.index(axis) for axis in ("batch", "token")]
        tokens = weights.shape[axes[0]] * weights.shape[axes[1]]
        self.edges[reader] = edges
        self.sums[reader] = self.sums.get(reader, 0) + tokens * weights.double().mean(axes, keepdim=True)
        self.tokens[reader] = self.tokens.get(reader, 0) + tokens
        return weights

    def mean(self, reader: Reader) -> Tensor:
        """Return the mean of the weights over batch and tokens, which have one entry."""
        return self.sums[reader] / self.tokens[reader]

    def weights_pn(self, reader: Reader) -> Array:
        """Return the mean weight of each source in each input, or the distance of H_res from the identity."""
        mean, axes = self.mean(reader), self.edges[reader].axes
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
        other = self.reads.mean(reader).to(weights) if self.how == "mean" else None
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
            return x.repeated(copies)
        return x.repeat(copies, *[1] * (x.ndim - 1)) if isinstance(x, Tensor) else x

    return Prefix(prefix.position, *(tree_map(repeat, part) for part in prefix[1:]))


@torch.no_grad()
def losses(model: Decoder, batch: Batch, edit: Edit, copies: int = 1, after: Prefix | None = None) -> Array:
    """Return the summed negative log-likelihood of each copy of a batch, in nats. after: begin there."""
    inputs_bt, targets_bt = (x.repeat(copies, 1) for x in batch)
    before = model.connections[0].edit
    model.edit_edges(edit)
    try:
        hidden_btd = model.hidden(inputs_bt, after=None if after is None else repeat_prefix(after, copies))
    finally:
        model.edit_edges(before)
    nll, _ = model.losses(hidden_btd, targets_bt, fused=False)
    return nll.double().where(targets_bt.flatten() != -100, 0).view(copies, -1).sum(1).cpu().numpy()


@torch.no_grad()
def prefixes(model: Decoder, batch: Batch, edit: Edit) -> dict[int, Prefix]:
    """Return what each layer gets with an edit, by its position."""
    collected, before = Prefixes(), model.connections[0].edit
    model.edit_edges(edit)
    try:
        model.hidden(batch[0], observer=collected)
    finally:
        model.edit_edges(before)
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


def first_layer(sets: Sequence[Sequence[Edge]]) -> int:
    """Return the position of the first layer that these interventions affect."""
    return min(edge.reader.layer for edges in sets for edge in edges)
