"""Muon on two ranks at every ZeRO stage computes what it computes on one rank at ZeRO 0."""

from unittest import mock

import numpy as np
import pytest
import torch

from .run_files import assert_same_run, losses
from .synthetic import updates


def all_updates(runs: list[list[str]]) -> list[tuple[list[float], dict[str, np.ndarray]]]:
    """Return the losses and the weights of each run, with matrices orthogonalized in fp32.

    In bf16, a difference in the last bit of a gradient becomes one of about a percent of an update.
    """
    results = []
    with mock.patch("depthlm.optimizers.muon.DTYPE", torch.float32):
        for overrides in runs:
            curve, engine = updates(overrides, 4)
            # tensors would be sent as shared memory
            results.append((curve, {name: weight.numpy() for name, weight in engine.weights().items()}))
            engine.destroy()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("model", ["model=mhc", "backbone=qwen3_moe"])
def test_muon_on_two_ranks_at_every_stage_equals_muon_on_one(two_ranks, small_run, model):
    # clipping and accumulation take effect; the widths make shards that end within a row
    given = (model, "optimizer=muon", "optimizer.lr=0.01", "training.gradient_clipping=0.5",
             "training.micro_batch_size=1", "schedule=constant")  # fmt: skip
    stages = [small_run(*given, f"deepspeed=zero{stage}") for stage in range(4)]
    (expected_curve, expected), *one_rank = all_updates(stages)
    assert expected_curve[-1] < expected_curve[0]
    for curve, arrays in (*one_rank, *two_ranks(all_updates, stages)[0]):
        torch.testing.assert_close(curve, expected_curve, rtol=1e-6, atol=0)
        for name, weight in expected.items():
            assert np.linalg.norm(arrays[name] - weight) <= 1e-4 * np.linalg.norm(weight), name


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (3, "bf16")])
def test_a_run_with_muon_resumes_bit_for_bit_and_on_other_ranks(train_run, stage, precision):
    # at ZeRO 3, DeepSpeed never sets what follows shards of odd sizes, which mhc has
    given = ("model=attention_residuals", "backbone=qwen3_moe", "optimizer=muon", f"deepspeed=zero{stage}",
             f"precision={precision}", "training.max_steps=6")  # fmt: skip
    two = train_run(*given, ranks=2, name="two")
    resumed = train_run(*given, ranks=2, name="resumed", stops=(3, 6))
    assert_same_run(two, resumed)
    for stop, count in ((2, 2), (4, 1), (6, 2)):
        moved = train_run(*given, f"training.stop_after={stop}", ranks=count, name="moved")
    tolerance = 1e-3 if precision == "fp32" else 5e-3
    torch.testing.assert_close(losses(moved), losses(two), rtol=tolerance, atol=0)
