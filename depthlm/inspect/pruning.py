"""`inspect prune=`: keep the most useful sources of each read, and write the pruned model as a run directory.

The reads are pruned one after the other, from the first layer to the last, each with the reads before it already pruned
and those after it complete. While a read has more than k sources, each of them is removed in turn, the others of a
softmax are renormalized, and the one without which the loss is lowest stays removed.
"""

import itertools
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from depthlm.config import Config
from depthlm.config.saved import config_text, is_own, signed_config_text
from depthlm.errors import UserError
from depthlm.files import digest, read_record, replace_text, write_record
from depthlm.inspect.ablation import WITH_EDGES, kind_of, label, names
from depthlm.inspect.interventions import (
    Batch,
    Edge,
    Intervention,
    Reads,
    chunks,
    losses,
    prefixes,
    record,
)
from depthlm.inspect.picture import Array, Grid, Picture, draw_grids
from depthlm.model import Decoder
from depthlm.model.decoder import Prefix
from depthlm.model.edges import Kept, Reader
from depthlm.run_directory import MANIFEST, RunDirectory
from depthlm.runs.checkpoints import WEIGHTS
from depthlm.runs.manifest import Manifest, seal

# the sources that a read keeps, by its name and for each of its inputs, as in `model.kept_sources`
KeptSources = dict[str, list[list[int]]]


@dataclass
class Pruned:
    """A pruned model. before, after: its loss in nats per token. reads: of the complete model."""

    kept: KeptSources
    reads: Reads
    before: float
    after: float

    def lines(self) -> list[str]:
        """Return the results in lines."""
        total = len(self.reads.all_edges())
        removed = total - sum(self.is_kept(edge) for edge in self.reads.all_edges())
        return [f"loss {self.before:.4f} -> {self.after:.4f} nats per token without {removed} of {total} edges"]

    def is_kept(self, edge: Edge) -> bool:
        """Return whether an edge is kept."""
        return Kept(self.kept).keeps(edge.reader, edge.panel, self.reads.source(edge))

    def picture(self, model: Decoder) -> Picture:
        """Return the picture of the edges that are kept."""
        edges = self.reads.all_edges()
        rows = list(dict.fromkeys(edge[:2] for edge in edges))
        matrix = np.full((len(rows), 1 + max(map(self.reads.source, edges))), np.nan)
        for edge in edges:
            matrix[rows.index(edge[:2]), self.reads.source(edge)] = self.is_kept(edge)
        labels = [label(*reader, panel, len(self.reads.weights_pn(reader))) for reader, panel in rows]
        mechanisms = names(model)
        title = f"{' and '.join({mechanisms[kind_of(edge)]: 0 for edge in edges})}: the sources that each read keeps"
        draw = partial(draw_kept, matrix, labels, title)
        return Picture("pruning", "the sources that each read keeps", {"kept": matrix}, draw)


def draw_kept(matrix: Array, rows: Sequence[str], title: str) -> Any:
    """Draw which sources each read keeps."""
    return draw_grids([Grid("", matrix, rows=rows)], title, "", "source", "1: kept, 0: removed")


def prune(
    model: Decoder, batches: Sequence[Batch], k: int, file: Path | None = None, key: dict[str, Any] | None = None
) -> Pruned:
    """Return the pruned model, in which each read has at most k sources. The decoder itself does not change.

    file: where the reads that are done are kept; a later call with the same `key` continues from it.
    Raises UserError if the decoder has no sources over depth, or is pruned already.
    """
    if model.kept_sources:
        raise UserError(f"prune={k}: the model of this run is pruned already; prune the run that it comes from")
    reads, baselines = record(model, batches)
    edges = [edge for edge in reads.all_edges() if not reads.edges[edge.reader].maps_streams]
    if not edges:
        raise UserError(
            f"prune={k}: {' with '.join(names(model).values())} has no sources over depth; those with sources, except "
            f"the streams: {WITH_EDGES}"
        )
    by_read = [list(part) for _, part in itertools.groupby(edges, lambda edge: edge[:2])]
    crowded = [part for part in by_read if len(part) > k]
    key, content = {**(key or {}), "prune": k}, read_record(file) if file is not None else None
    done: list[list[int]] = content["done"] if content is not None and content.get("key") == key else []
    kept: KeptSources = {}
    with Progress(transient=True) as progress:
        # each round of a read with m sources tries m removals
        work = [len(part) * (len(part) + 1) // 2 - k * (k + 1) // 2 for part in crowded]
        task = progress.add_task(f"pruning {len(crowded)} reads", total=sum(work), completed=sum(work[: len(done)]))
        starts: tuple[int, list[Prefix]] = (-1, [])
        for number, part in enumerate(crowded):
            if number == len(done):
                layer = part[0].reader.layer
                before = Reads(Kept(kept))
                if starts[0] != layer:
                    starts = layer, [prefixes(model, batch, before)[layer] for batch in batches]
                removed = least_useful(model, batches, before, part, k, starts[1], partial(progress.advance, task))
                done.append([reads.source(edge) for edge in part if edge not in removed])
                if file is not None:
                    write_record(file, {"key": key, "done": done})
            keep(kept, reads, part[0].reader, part[0].panel, done[number])
    after = sum(float(losses(model, batch, Kept(kept))[0]) for batch in batches)
    tokens = sum(int((targets != -100).sum()) for _, targets in batches)
    return Pruned(kept, reads, float(baselines.sum()) / tokens, after / tokens)


def least_useful(
    model: Decoder, batches: Sequence[Batch], reads: Reads, part: Sequence[Edge], k: int, starts: Any, advance: Any
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
        advance(len(candidates))
    return removed


def keep(kept: KeptSources, reads: Reads, reader: Reader, panel: int, sources: Sequence[int]) -> None:
    """Add the sources that one input of a reader keeps; its other inputs keep all until they are pruned."""
    every = [source for source in reads.edges[reader].sources if source >= 0]
    panels = kept.setdefault(reader.name, [list(every) for _ in reads.weights_pn(reader)])
    panels[panel] = list(sources)


def make_pruned_folder(directory: Path, to: str | None, k: int) -> Path:
    """Return the folder of the pruned run. Raises UserError if it exists and is not empty."""
    folder = directory.with_name(f"{directory.absolute().name}-pruned{k}") if to is None else Path(to)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"to={folder}: exists already; give a new folder, or remove it")
    return folder


def write_pruned(
    directory: Path, folder: Path, config: Config, manifest: Manifest, kept: KeptSources, output_dir: Path
) -> None:
    """Write the run directory of a pruned model, whose checkpoint has the weights alone. Raises OSError.

    folder: the staging folder, which becomes `output_dir`.

    Only the user's own run gives one that counts as the user's own. It can be loaded, but not resumed.
    """
    config = replace(config, output_dir=str(output_dir), model=replace(config.model, kept_sources=kept))
    source, target = RunDirectory(directory).checkpoint(manifest.step), RunDirectory(folder)
    checkpoint = target.checkpoint(manifest.step)
    checkpoint.mkdir(parents=True)
    shutil.copyfile(source / WEIGHTS, checkpoint / WEIGHTS)
    for name in ("tokenizer.json", "tokenizer_config.json", RunDirectory(directory).environment.name):
        if (directory / name).is_file():
            shutil.copyfile(directory / name, folder / name)
    text = signed_config_text(config) if is_own(directory) else config_text(config)
    replace_text(target.config, text)
    files = {WEIGHTS: digest(checkpoint / WEIGHTS)}
    content = seal({**asdict(manifest), "config": asdict(config), "files": files})
    # the manifest makes the checkpoint complete
    replace_text(checkpoint / MANIFEST, json.dumps(content))
