"""Dropout in training: the same losses on other ranks, resumed, and with recomputed activations."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import depthlm
from depthlm.config import ConfigError
from depthlm.runs.records import read_metrics
from depthlm.training import train

from ..two_ranks import TwoRanks, train_on_ranks
from .run_files import curve

Overrides = Callable[..., list[str]]


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_with_dropout_equals_itself_on_two_ranks_resumed_and_recomputed(
    two_ranks: TwoRanks, small_run: Overrides, tmp_path: Path, stage: int
) -> None:
    def overrides(name: str, *more: str) -> list[str]:
        return small_run("backbone.dropout=0.2", f"deepspeed=zero{stage}", "training.max_steps=4", *more, name=name)

    def losses(name: str) -> list[float]:
        return [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")]

    assert train(depthlm.compose(overrides("straight"))) == 0
    for stop in (2, 4):
        assert train(depthlm.compose(overrides("resumed", f"training.stop_after={stop}"))) == 0
    recomputed = ("training.activation_checkpointing=true", "training.micro_batch_size=1")
    assert train(depthlm.compose(overrides("recomputed", *recomputed))) == 0
    assert two_ranks(train_on_ranks, overrides("two")) == [0, 0]
    assert curve(tmp_path / "straight") == curve(tmp_path / "resumed")
    assert len(losses("straight")) == 4
    for name in ("recomputed", "two"):
        torch.testing.assert_close(losses(name), losses("straight"), rtol=1e-5, atol=0)
    assert train(depthlm.compose(overrides("without", "backbone.dropout=0"))) == 0
    assert abs(losses("without")[0] - losses("straight")[0]) > 1e-3


def test_dropout_is_refused_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match=r"the attention of model=moda has none; give backbone\.dropout=0"):
        depthlm.compose(["model=moda", "backbone.dropout=0.1"])
    with pytest.raises(ConfigError, match=r"experts have none; give backbone\.mlp=swiglu or relu"):
        depthlm.compose(["backbone=qwen3_moe", "backbone.dropout=0.1"])
