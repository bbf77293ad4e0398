"""Experts that are spread over ranks: the same run as on one rank, resumed, converted, and with uneven loads."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import depthlm
from depthlm.training import train

from ..two_ranks import TwoRanks, train_on_ranks
from .run_files import assert_same, curve, weights

STEPS = 6
EXPERTS = ("backbone=qwen3_moe", "size.num_experts=4", "backbone.router_bias_rate=0.01", "training.log_every=1",
           f"training.max_steps={STEPS}", "training.micro_batch_size=2", "training.checkpoint_every=100")  # fmt: skip
Overrides = Callable[..., list[str]]


def assert_close(one: Path, other: Path, tolerance: float = 1e-5) -> None:
    """Assert that losses, gradient norms and final weights are equal within rounding."""
    rows, expected = curve(one), curve(other)
    assert len(rows) == STEPS
    torch.testing.assert_close([row[2] for row in rows], [row[2] for row in expected], rtol=tolerance, atol=0)
    torch.testing.assert_close([row[4] for row in rows], [row[4] for row in expected], rtol=10 * tolerance, atol=0)
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, weight in second.items():
        assert first[name].shape == weight.shape
        assert torch.dist(first[name].float(), weight.float()) <= 10 * tolerance * weight.float().norm() + 1e-12, name


@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2"])
def test_spread_experts_equal_those_of_one_rank(
    two_ranks: TwoRanks, small_run: Overrides, tmp_path: Path, stage: str
) -> None:
    given = (*EXPERTS, f"deepspeed={stage}")
    assert train(depthlm.compose(small_run(*given, name="one"))) == 0
    spread = (*given, "deepspeed.experts=2")
    assert two_ranks(train_on_ranks, small_run(*spread, name="two")) == [0, 0]
    assert_close(tmp_path / "two", tmp_path / "one")
    for stop in (3, STEPS):
        assert two_ranks(train_on_ranks, small_run(*spread, f"training.stop_after={stop}", name="resumed")) == [0, 0]
    assert curve(tmp_path / "two") == curve(tmp_path / "resumed")
    assert_same(weights(tmp_path / "two"), weights(tmp_path / "resumed"))
