"""Training depends on the interface of an engine alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

import depthlm
from depthlm.runs.records import read_metrics
from depthlm.training import train

from .plain_engine import build_plain_engine


def losses(directory: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(directory / "metrics.jsonl")]


def test_a_second_engine_trains_saves_and_resumes(
    small_run: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = ["model=dca", "training.batch_size=8", "training.micro_batch_size=4", "deepspeed=zero0"]
    assert train(depthlm.compose(small_run(*shared, name="deepspeed"))) == 0
    monkeypatch.setattr("depthlm.training.setup.build_engine", build_plain_engine)
    assert train(depthlm.compose(small_run(*shared, name="undisturbed"))) == 0
    assert train(depthlm.compose(small_run(*shared, "training.stop_after=10", name="resumed"))) == 0
    assert train(depthlm.compose(small_run(*shared, name="resumed"))) == 0
    assert losses(tmp_path / "resumed") == losses(tmp_path / "undisturbed")
    assert losses(tmp_path / "undisturbed") == pytest.approx(losses(tmp_path / "deepspeed"), rel=1e-5)
