"""Training depends on the interface of an engine alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import depthlm
from depthlm.runs.records import read_metrics
from depthlm.training import train
from depthlm.training.engine.optimizers import count_updates

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


class Counting(torch.optim.Optimizer):
    """Counts its steps in each group, and moves each parameter by the count."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                parameter.add_(group["step"])


def test_the_parts_of_a_group_are_counted_as_one_update() -> None:
    parts = [[nn.Parameter(torch.zeros(1)) for _ in range(count)] for count in (3, 1)]
    optimizer = Counting([{"params": params} for params in parts])
    count_updates(optimizer)
    for group in optimizer.param_groups:
        group["params"] = []
    for update in range(1, 4):
        for group, params in zip(optimizer.param_groups, parts, strict=True):
            for part in params:
                group["params"] = [part]
                optimizer.step()
                group["params"] = []
        assert [group["step"] for group in optimizer.param_groups] == [update, update]
    assert [part.item() for params in parts for part in params] == [1 + 2 + 3] * 4
