"""The most useful sources of each read over depth.

The reads are pruned one after the other, from the first layer to the last, each with the reads before it already pruned
and those after it complete. While a read has more than k sources, each of them is removed in turn, the others of a
softmax are renormalized, and the one without which the loss is lowest stays removed.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from depthlm.inspect.interventions import Batch, Edge, Intervention, Reads, chunks, losses, prefixes, record
from depthlm.model import Decoder
from depthlm.model.decoder import Prefix
from depthlm.model.edges import Edges, Reader, align_axes, replace_weights

# the sources that a read keeps, by its name and for each of its inputs
KeptSources = dict[str, list[list[int]]]


class Kept:
    """The edit of a pruned model: each read keeps some of its sources.

    sources: the numbers of the sources by the name of the reader, for each of its inputs. A reader that is not in it
    keeps all.
    """

    def __init__(self, sources: KeptSources) -> None:
        self.sources = sources

    def __call__(self, reader: Reader, weights: Tensor, edges: Edges) -> Tensor:
        """Return the weights without those of other sources."""
        panels = self.sources.get(reader.name)
        if panels is None:
            return weights
        rows = [[source < 0 or source in panel for source in edges.sources] for panel in panels]
        mask = torch.tensor(rows, device=weights.device)
        return replace_weights(weights, edges, align_axes(mask, ("panel", "source"), edges.axes))


def prune(model: Decoder, batches: Sequence[Batch], k: int) -> KeptSources:
    """Return the sources that reads keep, at most k of each input. The decoder itself does not change."""
    reads, _ = record(model, batches)
    edges = [edge for edge in reads.all_edges() if not reads.edges[edge.reader].maps_streams]
    kept: KeptSources = {}
    starts: tuple[int, list[Prefix]] = (-1, [])
    for part in (list(part) for _, part in itertools.groupby(edges, lambda edge: edge[:2])):
        if len(part) <= k:
            continue
        before, layer = Reads(Kept(kept)), part[0].reader.layer
        if starts[0] != layer:
            starts = layer, [prefixes(model, batch, before)[layer] for batch in batches]
        removed = least_useful(model, batches, before, part, k, starts[1])
        keep(kept, reads, part[0].reader, part[0].panel, [reads.source(e) for e in part if e not in removed])
    return kept


def least_useful(
    model: Decoder, batches: Sequence[Batch], reads: Reads, part: Sequence[Edge], k: int, starts: Any
) -> list[Edge]:
    """Return the edges of one read that are removed until k remain, in the order in which they are removed."""
    removed: list[Edge] = []
    while len(part) - len(removed) > k:
        candidates = [edge for edge in part if edge not in removed]
        sets = [[*removed, edge] for edge in candidates]
        totals = np.zeros(len(sets))
        for batch, start in zip(batches, starts, strict=True):
            for some in chunks(sets, batch):
                chosen = [sets[index] for index in some]
                edit = Intervention(reads, chosen, "zero")
                totals[some.start : some.stop] += losses(model, batch, edit, len(chosen), start)
        removed.append(candidates[int(totals.argmin())])
    return removed


def keep(kept: KeptSources, reads: Reads, reader: Reader, panel: int, sources: Sequence[int]) -> None:
    """Add the sources that one input of a reader keeps; its other inputs keep all until they are pruned."""
    every = [source for source in reads.edges[reader].sources if source >= 0]
    panels = kept.setdefault(reader.name, [list(every) for _ in reads.weights_pn(reader)])
    panels[panel] = list(sources)
