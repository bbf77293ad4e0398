"""The training loop: which rows it logs, and settings that must not change the curve."""

import os
import weakref
from contextlib import suppress
from statistics import fmean
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import depthlm
from depthlm.distributed.launchers import VARIABLES, ranks, restored_variables
from depthlm.distributed.process_group import start_distributed
from depthlm.model import Decoder
from depthlm.runs.records import read_metrics
from depthlm.training import train
from depthlm.training.engine import forget_group
from depthlm.training.setup import build_model, free_earlier_run
from depthlm.training.trainer import Trainer

from .run_files import losses


def test_rows_are_logged_at_their_intervals_and_have_the_mean_loss_since_the_last_row(train_run):
    given = ("training.max_steps=11", "training.checkpoint_every=7", "training.validate_every=5")
    each = losses(train_run(*given, "training.log_every=1", name="each"))
    rows = list(read_metrics(train_run(*given, "training.log_every=4") / "metrics.jsonl"))
    # the first, the last, and those with a checkpoint or a validation
    ends = [row["step"] for row in rows]
    assert ends == [1, 4, 5, 7, 8, 10, 11]
    assert [row["step"] for row in rows if "validation/local/loss" in row] == [5, 10, 11]
    assert all(row["tokens"] == row["step"] * 128 for row in rows)
    expected = [fmean(each[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    assert [row["mean_loss"] for row in rows] == pytest.approx(expected, rel=1e-9)


def test_settings_that_save_memory_do_not_change_the_curve_and_the_z_loss_does(train_run):
    steps = "training.max_steps=4"
    run = train_run(steps, name="plain")
    lean = ("training.activation_checkpointing=true", "training.micro_batch_size=2")
    assert losses(train_run(steps, *lean, name="lean")) == pytest.approx(losses(run), rel=1e-5)
    with_z_loss = train_run(steps, "training.z_loss=0.1", name="z_loss")
    # the first loss is before any update, and logged losses exclude the z-loss
    assert losses(with_z_loss)[0] == losses(run)[0]
    tokens = torch.arange(64).view(2, 32)
    plain, lowered = (depthlm.load(path)[0](tokens, tokens).z for path in (run, with_z_loss))
    assert lowered < plain


def test_a_finished_run_frees_its_model(train_run, monkeypatch):
    models = []

    def build(config: Any, device: Any) -> Decoder:
        model = build_model(config, device)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr("depthlm.training.setup.build_model", build)
    for stage in (0, 1):
        train_run("training.max_steps=1", f"deepspeed=zero{stage}", name=str(stage))
    free_earlier_run()
    assert [model() for model in models] == [None, None]


def test_a_run_that_fails_leaves_no_process_group_and_no_variables_of_a_launcher(small_run, monkeypatch):
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        forget_group()
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.setattr(Trainer, "fit", Mock(side_effect=RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
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
