"""Dropout in training: the same losses on other ranks, resumed, and with recomputed activations."""

import pytest
import torch

from .run_files import curve, losses


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_with_dropout_equals_itself_on_two_ranks_resumed_and_recomputed(train_run, stage):
    given = ("backbone.dropout=0.2", f"deepspeed=zero{stage}", "training.max_steps=3")
    straight = train_run(*given, name="straight")
    resumed = train_run(*given, name="resumed", stops=(1, 3))
    assert curve(straight) == curve(resumed)
    assert len(losses(straight)) == 3
    recomputed = ("training.activation_checkpointing=true", "training.micro_batch_size=1")
    for other in (train_run(*given, *recomputed, name="recomputed"), train_run(*given, ranks=2, name="two")):
        torch.testing.assert_close(losses(other), losses(straight), rtol=1e-5, atol=0)
    without = train_run(*given, "backbone.dropout=0", "training.stop_after=1", name="without")
    assert abs(losses(without)[0] - losses(straight)[0]) > 1e-3
