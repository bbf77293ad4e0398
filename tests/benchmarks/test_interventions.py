"""The interventions of the study on trained models."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.study.interventions import of_model
from depthlm.model import Decoder

from ..inspect.conftest import TOKENS, build
from ..inspect.test_ablation import BATCHES, Build

__all__ = ["build"]
SINGLE = [(TOKENS[:, :-1], TOKENS[:, 1:])]


def loss_of(model: Decoder) -> float:
    with torch.no_grad():
        return cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten()).item()


def test_pruning_and_fixed_weights_change_the_loss_of_attention_residuals(build: Build) -> None:
    model = build("model=attention_residuals", "model.connection.block_size=1")
    result = of_model(model, BATCHES, SINGLE)
    assert result["loss"] == pytest.approx(loss_of(model), rel=1e-5)
    assert result["edges"] == sum(range(1, 10))
    assert -1 <= result["rank"] <= 1
    losses = [result[key] for key in ("loss", "kept 8", "kept 4", "kept 2", "means")]
    assert len(set(losses)) == len(losses)
    assert loss_of(model) == pytest.approx(result["loss"], rel=1e-5)


def test_static_weights_equal_their_means(build: Build) -> None:
    result = of_model(build("model=denseformer"), BATCHES, SINGLE)
    assert result["means"] == pytest.approx(result["loss"], rel=1e-6)
    assert result["kept 2"] != pytest.approx(result["loss"], rel=1e-4)


def test_what_a_mechanism_lacks_is_left_out(build: Build) -> None:
    assert of_model(build("model=vanilla"), BATCHES, SINGLE).keys() == {"loss"}
    assert of_model(build("model=mhc"), BATCHES, SINGLE).keys() == {"loss", "edges", "rank", "means"}
