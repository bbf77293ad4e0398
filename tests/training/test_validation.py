"""Diagnostics of mechanisms, and how they reach metrics.jsonl."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import depthlm
from depthlm.runs.records import read_metrics
from depthlm.training import train
from depthlm.training.validation import diagnose

SHAPE = ["size=micro", "data.tokenizer=bytes"]


def test_the_worst_deviation_of_mhc_over_sublayers_and_tokens() -> None:
    model = depthlm.build_model(depthlm.compose([*SHAPE, "model=mhc"]))
    with torch.no_grad():
        model.connections[2].bias += torch.linspace(-4, 4, 24)
    diagnostics = diagnose(model, torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0)))
    assert diagnostics.keys() == {"mhc_row_deviation", "mhc_column_deviation"}
    assert diagnostics["mhc_row_deviation"] < 1e-6
    # the maximum is that of the one sublayer which is far from its manifold
    assert 1e-3 < diagnostics["mhc_column_deviation"] < 1


def test_a_mechanism_without_diagnostics_needs_no_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = depthlm.build_model(depthlm.compose(SHAPE))
    monkeypatch.setattr(model, "hidden", None)
    assert diagnose(model, torch.zeros(1, 4, dtype=torch.long)) == {}


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_every_validation_logs_diagnostics(small_run: Callable[..., list[str]], tmp_path: Path, stage: int) -> None:
    overrides = ["model=mhc", f"deepspeed=zero{stage}", "training.max_steps=2", "training.validate_every=1"]
    assert train(depthlm.compose(small_run(*overrides))) == 0
    rows = list(read_metrics(tmp_path / "run/metrics.jsonl"))
    assert len(rows) == 2
    assert all(row["mechanism/mhc_row_deviation"] < 1e-6 for row in rows)
    assert all(row["mechanism/mhc_column_deviation"] < 1e-2 for row in rows)
