"""A pipeline over processes computes what one process computes, and sends what the accounting counts."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import depthlm
from depthlm.summary.overhead import transitions

from ...forks import Forks
from ...model.conftest import PRESETS
from ...options import configuration
from ...two_ranks import TwoRanks
from .runs import SHAPE, Updates, all_pipeline_updates, plain_updates

pytestmark = pytest.mark.slow
TWO_CHUNKS = ["training.pipeline.stages=2", "training.pipeline.chunks=2"]


@pytest.fixture(scope="module", params=[3, 4])
def several_ranks(request: pytest.FixtureRequest, forks: Forks) -> Iterator[tuple[int, TwoRanks]]:
    ranks = TwoRanks(forks, request.param)
    yield request.param, ranks
    ranks.close()


def compare(overrides: list[str], ranks: list[Updates], dtype: torch.dtype) -> None:
    """Compare the losses, the gradients of the first step, and the final weights with those of one process."""
    expected, tolerance = plain_updates(overrides, dtype), 1e-10 if dtype == torch.float64 else 1e-5
    for found in ranks:
        np.testing.assert_allclose(found.losses, expected.losses, rtol=tolerance)
        for name, gradient in found.gradients.items():
            largest = max(np.abs(expected.gradients[name]).max(), 1e-2)
            np.testing.assert_allclose(gradient, expected.gradients[name], 0, tolerance * largest, err_msg=name)
    assert {name for found in ranks for name in found.gradients} == expected.gradients.keys()
    assert ranks[0].weights.keys() == expected.weights.keys()
    if dtype == torch.float64:
        for name, weight in ranks[0].weights.items():
            # Adam divides gradients that are zero but for rounding by their own size
            if np.abs(expected.gradients[name]).max() > 1e-12:
                np.testing.assert_allclose(weight, expected.weights[name], rtol=1e-6, atol=1e-7, err_msg=name)


def counted(overrides: list[str], stages: int, chunks: int, caching: bool = True) -> list[float]:
    """Return the values per token that `summary --pipeline` counts across each transition."""
    sent = transitions(depthlm.build_model(configuration(*SHAPE, *overrides)), stages, chunks)
    return [x / 2 for x in (sent.cached if caching else sent.naive)]


def sent_by(ranks: list[Updates], transitions: int) -> list[float]:
    """Return the values per token across each transition. A backward pass must return as many."""
    sent = {chunk: values for rank in ranks for chunk, values in rank.sent.items()}
    returned = {chunk: values for rank in ranks for chunk, values in rank.returned.items()}
    assert sent == {chunk - 1: values for chunk, values in returned.items()}
    return [sent[chunk] for chunk in range(transitions)]


def test_every_preset_in_two_stages_of_two_chunks(two_ranks):
    runs = [[f"model={preset}", *TWO_CHUNKS] for preset in PRESETS]
    results = two_ranks(all_pipeline_updates, runs, torch.float64)
    for run, *ranks in zip(runs, *results, strict=True):
        compare(run[:1], ranks, torch.float64)
        assert sent_by(ranks, 3) == counted(run[:1], 2, 2)


# a tied embedding and the layers of a loop are on both stages
OPTIONS = [
    "backbone.tie_embeddings=true backbone=lm1b",
    "model=moda model.loops=2 model.attention.start=identity",
    "model=attention_residuals data.document_mask=true",
    "model=dca training.activation_checkpointing=true training.micro_batch_size=2",
    "model=attention_residuals_full training.pipeline.caching=false",
    "model=value_residual optimizer=muon training.z_loss=0.01",
    "model=moda backbone=kimi_linear backbone.mlp=swiglu",
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_options(two_ranks, dtype):
    chosen = OPTIONS if dtype == torch.float64 else OPTIONS[:3]
    runs = [[*options.split(), *TWO_CHUNKS] for options in chosen]
    results = two_ranks(all_pipeline_updates, runs, dtype)
    for run, *ranks in zip(runs, *results, strict=True):
        compare(run[:-2], ranks, dtype)
        caching = "training.pipeline.caching=false" not in run
        assert sent_by(ranks, 3) == counted(run[:-2] if caching else run[:-3], 2, 2, caching)


def test_three_stages_and_two_replicas_of_two(several_ranks):
    count, ranks = several_ranks
    stages = 3 if count == 3 else 2
    tied = "model=attention_residuals backbone.tie_embeddings=true"
    given = [[*options.split(), "training.batch_size=8"] for options in (tied, "model=mhc", "model=dca", "model=moda")]
    runs = [[*options, f"training.pipeline.stages={stages}"] for options in given]
    results = ranks(all_pipeline_updates, runs, torch.float64)
    for options, *found in zip(given, *results, strict=True):
        compare(options, found, torch.float64)
        assert sent_by(found, stages - 1) == counted(options, stages, 1)
