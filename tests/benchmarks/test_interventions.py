"""The interventions of the study on trained models."""

from itertools import starmap

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.study.interventions import of_model
from depthlm.inspect.interventions import Batch
from depthlm.inspect.pruning import prune
from depthlm.model import Decoder
from depthlm.model.edges import Kept

from ..inspect.conftest import TOKENS, build
from ..inspect.test_ablation import Build

__all__ = ["build"]
CHOSEN: list[Batch] = [(TOKENS[:2, :-1], TOKENS[:2, 1:])]
MEASURED: list[Batch] = [(TOKENS[2:, :-1], TOKENS[2:, 1:]), (TOKENS[:1, :5], TOKENS[:1, 1:6])]


@torch.no_grad()
def loss_of(model: Decoder) -> float:
    """The mean over the tokens on which losses are measured."""
    logits = torch.cat([model(inputs).flatten(0, 1) for inputs, _ in MEASURED])
    return cross_entropy(logits, torch.cat([targets.flatten() for _, targets in MEASURED])).item()


@pytest.mark.slow
def test_sources_are_chosen_on_some_tokens_and_losses_measured_on_others(build: Build) -> None:
    model = build("model=attention_residuals", "model.connection.block_size=1")
    for connection in model.connections:
        connection.query.normal_(generator=torch.Generator().manual_seed(0))
    result = of_model(model, CHOSEN, MEASURED)
    assert result["loss"] == pytest.approx(loss_of(model), rel=1e-5)
    # all but the only source of the first read
    assert result["edges"] == sum(range(2, 10))
    assert -1 <= result["rank"] <= 1
    assert result["means"] != pytest.approx(result["loss"], rel=1e-5)
    for k in (8, 4, 2):
        model.edit_edges(Kept(prune(model, CHOSEN, k).kept))
        assert result[f"kept {k}"] == pytest.approx(loss_of(model), rel=1e-5)
        model.edit_edges(None)
    assert len({*starmap(round, [(result[f"kept {k}"], 5) for k in (8, 4, 2)])}) == 3


def test_static_weights_equal_their_means(build: Build) -> None:
    result = of_model(build("model=denseformer"), CHOSEN, MEASURED)
    assert result["means"] == pytest.approx(result["loss"], rel=1e-6)
    assert result["kept 2"] != pytest.approx(result["loss"], rel=1e-4)
    # of four layers, no read has more than five sources
    assert "kept 8" not in result


def test_what_a_mechanism_lacks_is_left_out(build: Build) -> None:
    assert of_model(build("model=vanilla"), CHOSEN, MEASURED).keys() == {"loss"}
    assert of_model(build("model=mhc"), CHOSEN, MEASURED).keys() == {"loss", "edges", "rank", "means"}
    assert of_model(build("model=unet_skip"), CHOSEN, MEASURED).keys() == {"loss", "edges", "rank", "means"}
