"""The sources that a read keeps are those of a greedy search."""

import torch

import depthlm
from depthlm.model import initialize
from docs.results.analysis.pruning import Kept, prune

from ...options import configuration

TOKENS = torch.randint(256, (3, 12), generator=torch.Generator().manual_seed(0))
BATCHES = [(TOKENS[:2, :-1], TOKENS[:2, 1:]), (TOKENS[2:, :-1], TOKENS[2:, 1:])]


def test_pruning_keeps_the_greedily_chosen_sources():
    overrides = "model=attention_residuals", "model.connection.block_size=1", "size=micro", "size.num_layers=2"
    model = depthlm.build_model(configuration(*overrides, "precision=fp32"))
    initialize(model, seed=0, std=0.2)
    model.eval().requires_grad_(False)

    def loss(sources: dict[str, list[list[int]]]) -> float:
        model.edit_edges(Kept(sources))
        total = sum(float(model(*batch).nll) for batch in BATCHES)
        model.edit_edges(None)
        return total

    kept: dict[str, list[list[int]]] = {}
    for count, name in enumerate(["mlp_0", "attention_1", "mlp_1", "final"], 2):
        sources = list(range(count))
        while len(sources) > 2:
            tried = {source: loss(kept | {name: [[s for s in sources if s != source]]}) for source in sources}
            sources.remove(min(tried, key=lambda source: tried[source]))
            kept[name] = [sources]
    assert prune(model, BATCHES, 2) == kept
