"""What the loop does when something goes wrong, and what it counts."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import depthlm
from depthlm.model import Decoder
from depthlm.training import FAILED, train
from depthlm.training.metrics import read_metrics
from depthlm.training.run import build_model, forget_the_run_before


@pytest.fixture
def poisoned_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[int]], None]:
    """Make the gradients of the named steps (from 1) not finite."""

    def poison(steps: set[int]) -> None:
        seen = [0]

        def build(config: Any, device: Any) -> Decoder:
            model = build_model(config, device)

            def spoil(gradient: torch.Tensor) -> torch.Tensor:
                seen[0] += 1
                return gradient * float("inf") if seen[0] in steps else gradient

            model.final_norm.weight.register_hook(spoil)
            return model

        monkeypatch.setattr("depthlm.training.run.build_model", build)

    return poison


def test_a_bad_batch_is_left_out_and_listed(
    small_run: Callable[..., list[str]], tmp_path: Path, poisoned_steps: Callable[[set[int]], None]
) -> None:
    poisoned_steps({4})
    assert train(depthlm.compose(small_run("training.max_steps=10"))) == 0
    rows = list(read_metrics(tmp_path / "run/metrics.jsonl"))
    assert [row["step"] for row in rows if row["grad_norm"] is None] == [4]
    # the schedule rests with the weights
    assert rows[4]["learning_rate"] == rows[3]["learning_rate"]
    manifest = json.loads((tmp_path / "run/checkpoints/step-00000010/manifest.json").read_text())
    assert manifest["skipped"] == [4]
    assert manifest["tokens"] == 10 * 4 * 32


def test_bad_batches_in_a_row_end_the_run(
    small_run: Callable[..., list[str]], poisoned_steps: Callable[[set[int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    poisoned_steps(set(range(3, 100)))
    assert train(depthlm.compose(small_run("training.max_skipped=2"))) == FAILED
    assert "3 batches in a row without a finite gradient" in capsys.readouterr().out


def test_rows_come_every_log_every_steps_with_the_first_the_last_and_the_saved(
    small_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    overrides = (
        "training.max_steps=11",
        "training.log_every=4",
        "training.checkpoint_every=7",
        "training.validate_every=5",
    )
    assert train(depthlm.compose(small_run(*overrides))) == 0
    rows = list(read_metrics(tmp_path / "run/metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 4, 5, 7, 8, 10, 11]
    assert [row["step"] for row in rows if "validation/local/loss" in row] == [5, 10, 11]
    assert all(row["tokens"] == row["step"] * 128 for row in rows)


@pytest.mark.parametrize("setting", ["training.activation_checkpointing=true", "training.micro_batch_size=2"])
def test_what_saves_memory_does_not_change_the_curve(
    small_run: Callable[..., list[str]], tmp_path: Path, setting: str
) -> None:
    assert train(depthlm.compose(small_run("training.max_steps=5", name="plain"))) == 0
    assert train(depthlm.compose(small_run("training.max_steps=5", setting, name="lean"))) == 0
    curves = [[row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("plain", "lean")]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


def test_z_loss_reaches_the_updates(small_run: Callable[..., list[str]], tmp_path: Path) -> None:
    for name, weight in (("without", 0.0), ("with", 0.1)):
        assert train(depthlm.compose(small_run("training.max_steps=4", f"training.z_loss={weight}", name=name))) == 0
    curves = [[row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("without", "with")]
    # the first loss is before any update, and what is logged leaves the z-loss out
    assert curves[0][0] == curves[1][0]
    assert curves[0][1] != curves[1][1]


def test_a_deterministic_run_gives_the_same_bits_twice(small_run: Callable[..., list[str]], tmp_path: Path) -> None:
    try:
        for name in ("one", "two"):
            assert train(depthlm.compose(small_run("training.max_steps=4", "deterministic=true", name=name))) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    weights = [
        (tmp_path / name / "checkpoints/step-00000004/model.safetensors").read_bytes() for name in ("one", "two")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_run_that_has_ended_leaves_its_memory_to_the_next(
    small_run: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    models = []

    def build(config: Any, device: Any) -> Decoder:
        model = build_model(config, device)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr("depthlm.training.run.build_model", build)
    assert train(depthlm.compose(small_run("training.max_steps=3", f"deepspeed=zero{stage}"))) == 0
    forget_the_run_before()
    assert [model() for model in models] == [None]


@pytest.mark.slow
def test_compiling_does_not_change_the_curve(small_run: Callable[..., list[str]], tmp_path: Path) -> None:
    assert train(depthlm.compose(small_run("training.max_steps=5", name="eager"))) == 0
    assert train(depthlm.compose(small_run("training.max_steps=5", "training.compile=true", name="compiled"))) == 0
    curves = [
        [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("eager", "compiled")
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
