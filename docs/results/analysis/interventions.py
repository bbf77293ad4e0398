"""The committed records of interventions on the trained models of docs/results, one line per run.

    python docs/results/analysis/interventions.py 12     # adds those of the complete runs in 12 layers

The run directories must exist. A line has the losses of the model, of the model whose weights over depth all have
their means over the tokens, and of the model if its reads keep 8, 4 or 2 sources. Its rank correlation, over `edges`
edges, is that of an edge's weight and the change of the loss without it. Of mHC, an edge is H_res, and its weight the
distance from the identity. Sources are chosen and edges removed on the first TOKENS tokens of the validation set;
losses are those of the next MEASURED tokens.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from depthlm.build import load_checkpoint
from depthlm.errors import UserError
from depthlm.inspect.command import Run, read_tokens
from depthlm.inspect.interventions import Batch, Intervention, ablate, losses, record
from depthlm.model import Decoder
from depthlm.model.edges import Edit
from depthlm.runs.checkpoints import newest_checkpoint
from docs.results.analysis.archive import ARCHIVE, lines_of, points_of, write_lines
from docs.results.analysis.pruning import Kept, prune

NAME = "interventions"
TOKENS, MEASURED = 8192, 65_536
KEPT = (8, 4, 2)
# the titles of the losses with an intervention
COSTS = {"means": "weights fixed to their means"} | {f"kept {k}": f"{k} sources" for k in KEPT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", help="the number of layers of the models")
    layers = parser.parse_args().layers
    lines, recorded = lines_of(NAME), lines_of("depth")
    points = [point for point in points_of("depth") if not point.selects]
    wanted = [p for p in points if p.settings["size.num_layers"] == layers and p.settings["model"] != "vanilla"]
    for point in track(wanted, "interventions"):
        name = Path(point.directory).name
        if name in recorded and name not in lines and newest_checkpoint(Path(point.directory)) is not None:
            lines[name] = {"run": name} | of_run(Path(point.directory))
            write_lines(NAME, [lines[n] for p in points if (n := Path(p.directory).name) in lines])
    print(f"{len(lines)} runs in {ARCHIVE / f'{NAME}.jsonl'}")


def of_run(directory: Path) -> dict[str, Any]:
    """Return the results of the interventions on the model of a run directory."""
    model, config, _ = load_checkpoint(directory)
    tokens, source = read_tokens(directory, config, None, TOKENS + MEASURED)
    return of_model(model, *(Run(model, config, part, source).batches() for part in tokens.split([TOKENS, MEASURED])))


def of_model(model: Decoder, chosen: Sequence[Batch], measured: Sequence[Batch]) -> dict[str, Any]:
    """Return the results of the interventions on a model, as far as its mechanism has them.

    chosen: batches on which edges are removed and sources chosen. measured: those of the other losses.
    """
    result: dict[str, Any] = {"loss": mean_loss(model, measured)}
    try:
        ((picture, *_), _) = ablate(model, chosen)
    except UserError:
        # no weights over depth
        return result
    arrays = {name.removeprefix(f"{picture.name}_"): array for name, array in picture.arrays.items()}
    rank, has_edge = float(arrays["change_rank_correlation"]), np.isfinite(arrays["change"])
    sources = has_edge.sum(1)
    # the weight of an only source is fixed, unless it is the map of streams
    free = sources if has_edge.shape[1] == 1 else sources[sources > 1]
    result |= {"edges": int(free.sum()), "rank": None if np.isnan(rank) else rank}
    reads, _ = record(model, chosen)
    result["means"] = mean_loss(model, measured, Intervention(reads, [reads.all_edges()], "mean"))
    for k in KEPT:
        if sources.max() > k:
            result[f"kept {k}"] = mean_loss(model, measured, Kept(prune(model, chosen, k)))
    return result


def mean_loss(model: Decoder, batches: Sequence[Batch], edit: Edit | None = None) -> float:
    """Return the loss of batches in nats per token."""
    total = sum(float(losses(model, batch, edit)[0]) for batch in batches)
    return total / sum(int((targets != -100).sum()) for _, targets in batches)


if __name__ == "__main__":
    main()
