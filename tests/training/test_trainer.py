"""The training loop: which rows it logs, and settings that must not change the curve."""

import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import depthlm
from depthlm.data import Batches
from depthlm.distributed.launchers import VARIABLES, ranks, restored_variables
from depthlm.distributed.process_group import start_distributed
from depthlm.files import read_json
from depthlm.model import Decoder
from depthlm.runs.records import read_metrics
from depthlm.training import train
from depthlm.training.engine import forget_group
from depthlm.training.setup import build_model, free_earlier_run
from depthlm.training.trainer import Trainer

from .run_files import curve


def test_rows_are_logged_every_log_every_steps_and_at_the_first_last_and_saved_steps(
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


def test_a_row_has_the_mean_loss_of_the_updates_since_the_last_interval(
    small_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    for name, every in (("each", 1), ("intervals", 4)):
        overrides = small_run("training.max_steps=11", f"training.log_every={every}", name=name)
        assert train(depthlm.compose(overrides)) == 0
    each = [row["loss"] for row in read_metrics(tmp_path / "each/metrics.jsonl")]
    rows = list(read_metrics(tmp_path / "intervals/metrics.jsonl"))
    ends = [row["step"] for row in rows]
    assert ends == [1, 4, 8, 10, 11]
    means = [fmean(each[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    assert [row["mean_loss"] for row in rows] == pytest.approx(means, rel=1e-9)


def test_a_row_has_the_time_for_which_the_batches_since_the_last_row_were_waited_for(
    small_run: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("training.max_steps=7", "training.log_every=3", "training.validate_every=4")
    assert train(depthlm.compose(small_run(*settings, name="quick"))) == 0
    read, waited = Batches.__getitem__, []

    def slow(batches: Batches, step: int) -> Any:
        start = time.perf_counter()
        time.sleep(0.02 * (step + 1))
        batch = read(batches, step)
        waited.append(time.perf_counter() - start)
        return batch

    monkeypatch.setattr(Batches, "__getitem__", slow)
    assert train(depthlm.compose(small_run(*settings, name="slow"))) == 0
    rows = list(read_metrics(tmp_path / "slow/metrics.jsonl"))
    ends = [row["step"] for row in rows]
    assert ends == [1, 3, 4, 6, 7]
    expected = [sum(waited[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    assert [row["data_seconds"] for row in rows] == pytest.approx(expected, rel=0.1, abs=0.02)
    # it is only measured
    assert curve(tmp_path / "slow") == curve(tmp_path / "quick")
    assert "waiting for data" in (tmp_path / "slow/train.log").read_text()


@pytest.mark.parametrize("setting", ["training.activation_checkpointing=true", "training.micro_batch_size=2"])
def test_settings_that_save_memory_do_not_change_the_curve(
    small_run: Callable[..., list[str]], tmp_path: Path, setting: str
) -> None:
    assert train(depthlm.compose(small_run("training.max_steps=5", name="plain"))) == 0
    assert train(depthlm.compose(small_run("training.max_steps=5", setting, name="lean"))) == 0
    curves = [[row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("plain", "lean")]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


def test_z_loss_changes_the_updates(small_run: Callable[..., list[str]], tmp_path: Path) -> None:
    for name, weight in (("without", 0.0), ("with", 0.1)):
        assert train(depthlm.compose(small_run("training.max_steps=4", f"training.z_loss={weight}", name=name))) == 0
    curves = [[row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("without", "with")]
    # the first loss is before any update, and logged losses exclude the z-loss
    assert curves[0][0] == curves[1][0]
    assert curves[0][1] != curves[1][1]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_finished_run_frees_its_model(
    small_run: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    models = []

    def build(config: Any, device: Any) -> Decoder:
        model = build_model(config, device)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr("depthlm.training.setup.build_model", build)
    assert train(depthlm.compose(small_run("training.max_steps=3", f"deepspeed=zero{stage}"))) == 0
    free_earlier_run()
    assert [model() for model in models] == [None]


@pytest.mark.slow
def test_compiling_does_not_change_the_curve(small_run: Callable[..., list[str]], tmp_path: Path) -> None:
    assert train(depthlm.compose(small_run("training.max_steps=5", name="eager"))) == 0
    assert train(depthlm.compose(small_run("training.max_steps=5", "training.compile=true", name="compiled"))) == 0
    curves = [
        [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("eager", "compiled")
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def test_a_run_trains_in_a_thread_of_another_program(small_run: Callable[..., list[str]], tmp_path: Path) -> None:
    """Such as the background job of a notebook, where Python allows no handlers of signals."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(train, depthlm.compose(small_run("training.max_steps=2"))).result() == 0
    assert read_json(tmp_path / "run/summary.json")["steps"] == 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_leaves_no_process_group_and_no_variables_of_a_launcher(
    small_run: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        forget_group()
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.setattr(Trainer, "fit", Mock(side_effect=RuntimeError("a bug") if fails else None, return_value=0))
    with pytest.raises(RuntimeError, match="a bug") if fails else nullcontext():
        train(depthlm.compose(small_run()))
    assert not torch.distributed.is_initialized()
    assert "RANK" not in os.environ
    assert os.environ["MASTER_PORT"] == "1234"
    # a group of the caller stays
    with restored_variables():
        start_distributed(ranks())
        with suppress(RuntimeError):
            train(depthlm.compose(small_run(name="second")))
    assert torch.distributed.is_initialized()
