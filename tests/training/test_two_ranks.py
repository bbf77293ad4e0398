"""Two ranks compute what one computes, and go on where they stopped, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest

import depthlm
from depthlm.training import train

from ..two_ranks import TwoRanks, train_on_ranks
from .test_resume import curve

@pytest.mark.parametrize("kind", [["precision=fp32"], ["precision=bf16"], ["deepspeed=zero1"], ["deepspeed=zero3", "precision=bf16"]], ids=" ".join)
def test_straight_equals_resumed(two_ranks: TwoRanks, small_run: Callable[..., list[str]], tmp_path: Path, kind) -> None:
    assert two_ranks(train_on_ranks, small_run(*kind, name="straight")) == [0, 0]
    assert two_ranks(train_on_ranks, small_run(*kind, "training.stop_after=10", name="resumed")) == [0, 0]
    assert two_ranks(train_on_ranks, small_run(*kind, name="resumed")) == [0, 0]
    assert curve(tmp_path / "straight") == curve(tmp_path / "resumed")
