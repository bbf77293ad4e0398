"""Muon on two ranks at every ZeRO stage computes what it computes on one rank at ZeRO 0."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import depthlm
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.training import train
from depthlm.training.engine import build_engine
from depthlm.training.plan import learning_rate, make_plan
from depthlm.training.step import train_step

from ..two_ranks import TwoRanks, train_and_resume, train_on_ranks
from .run_files import assert_same, curve, states, weights
from .synthetic import synthetic_tokens

Overrides = Callable[..., list[str]]
STEPS = 4


def updates(overrides: list[str]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return the losses of a few updates on synthetic tokens, of which each rank has its share, and the weights."""
    torch.set_num_threads(1)
    config = depthlm.compose(overrides)
    start_distributed(ranks())
    plan = make_plan(config, ranks())
    engine = build_engine(config, plan, depthlm.build_model(config))
    losses = []
    for step, tokens in enumerate(synthetic_tokens(config, STEPS)):
        engine.set_learning_rate(learning_rate(config, plan, step))
        batch = tokens.chunk(plan.world_size)[ranks().rank].view(plan.accumulation, plan.micro_batch_size, -1)
        losses.append(float(train_step(engine, batch, plan, 0.0)) / plan.tokens_per_step)
    # tensors would be sent as shared memory
    arrays = {name: weight.numpy() for name, weight in engine.weights().items()}
    engine.destroy()
    return losses, arrays


def all_updates(runs: list[list[str]]) -> list[tuple[list[float], dict[str, np.ndarray]]]:
    """Return `updates` of each run, with matrices orthogonalized in fp32.

    In bf16, a difference in the last bit of a gradient becomes one of about a percent of an update.
    """
    with mock.patch("depthlm.optimizers.muon.DTYPE", torch.float32):
        return [updates(overrides) for overrides in runs]


OTHER_MODELS = ("model=vanilla", "model=moda", "model=attention_residuals", "backbone=qwen3_moe")


@pytest.mark.parametrize("model", ["model=mhc", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_MODELS)])
def test_muon_on_two_ranks_at_every_stage_equals_muon_on_one(
    two_ranks: TwoRanks, small_run: Overrides, model: str
) -> None:
    # clipping and accumulation take effect; the widths make shards that end within a row
    given = (model, "optimizer=muon", "optimizer.lr=0.01", "training.gradient_clipping=0.5",
             "training.micro_batch_size=1", "schedule=constant")  # fmt: skip
    stages = [small_run(*given, f"deepspeed=zero{stage}") for stage in range(4)]
    (expected_losses, expected), *one_rank = all_updates(stages)
    assert expected_losses[-1] < expected_losses[0]
    for losses, arrays in (*one_rank, *two_ranks(all_updates, stages)[0]):
        torch.testing.assert_close(losses, expected_losses, rtol=1e-6, atol=0)
        for name, weight in expected.items():
            assert np.linalg.norm(arrays[name] - weight) <= 1e-4 * np.linalg.norm(weight), name


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_a_run_with_muon_resumes_bit_for_bit_and_on_other_ranks(
    two_ranks: TwoRanks, small_run: Overrides, tmp_path: Path, stage: int, precision: str
) -> None:
    # at ZeRO 3, DeepSpeed never sets what follows shards of odd sizes, which mhc has
    given = ("model=attention_residuals", "backbone=qwen3_moe", "optimizer=muon", f"deepspeed=zero{stage}",
             f"precision={precision}", "training.max_steps=6")  # fmt: skip
    train_and_resume(two_ranks, small_run, given, (3, 6))
    two, resumed, moved = (tmp_path / name for name in ("two", "resumed", "moved"))
    assert curve(two) == curve(resumed)
    assert_same(weights(two), weights(resumed))
    assert_same(states(two), states(resumed))
    assert two_ranks(train_on_ranks, small_run(*given, "training.stop_after=2", name="moved")) == [0, 0]
    assert train(depthlm.compose(small_run(*given, "training.stop_after=4", name="moved"))) == 0
    assert two_ranks(train_on_ranks, small_run(*given, name="moved")) == [0, 0]
    losses = [[row[2] for row in curve(path)] for path in (moved, two)]
    torch.testing.assert_close(*losses, rtol=1e-3 if precision == "fp32" else 5e-3, atol=0)
