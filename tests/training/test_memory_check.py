"""A run that does not fit in memory is refused before it is built, with settings that fit."""

import re

import pytest
import torch

import depthlm
from depthlm.accounting.memory import MemoryEstimator
from depthlm.config import Config
from depthlm.distributed.launchers import SINGLE_RANK, Ranks
from depthlm.errors import UserError
from depthlm.training import memory_check, train
from depthlm.training.memory_check import check_memory, what_fits

from ..options import configuration

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def small(*overrides: str) -> Config:
    return configuration("size=micro", "size.num_layers=2", "training.batch_size=16", "precision=bf16", *overrides)


def fitting(error: pytest.ExceptionInfo[UserError]) -> list[list[str]]:
    """Return the overrides of each line that suggests settings."""
    lines = re.findall(r"^  - (.*) \([\d.]+ GiB\)$", str(error.value), re.MULTILINE)
    return [line.split() for line in lines]


def test_suggested_settings_fit_and_include_the_largest_micro_batch():
    estimator = MemoryEstimator(small(), "cuda")
    available = int(estimator.estimate(0, 1, 4, 4).total) + 1
    with pytest.raises(
        UserError, match=r"does not fit in memory: .* GiB estimated, .* GiB is what each GPU has"
    ) as error:
        check_memory(small(), SINGLE_RANK, GPU, available)
    assert ["training.micro_batch_size=4"] in fitting(error)
    assert any("training.activation_checkpointing=true" in overrides for overrides in fitting(error))
    assert "memory=ignore" in str(error.value)
    for overrides in fitting(error):
        memory = check_memory(small(*overrides), SINGLE_RANK, GPU, available)
        assert memory is not None
        assert memory.total <= available


def test_no_stage_is_suggested_that_the_settings_exclude():
    estimator = MemoryEstimator(small(), "cuda")
    ranks, available = Ranks(0, 0, 8, 8, "torchrun"), int(estimator.estimate(0, 8, 1, 2).total) + 1
    stages = [
        any("deepspeed" in text for text in what_fits(estimator, small(*overrides), ranks, available))
        for overrides in ([], ["precision.fp32_residual=true"])
    ]
    assert stages == [True, False]


def test_where_nothing_fits_the_error_says_so_and_ignore_warns_only(caplog):
    with pytest.raises(UserError, match="no micro-batch fits, with or without activation checkpointing"):
        check_memory(small(), SINGLE_RANK, GPU, 2**20)
    assert check_memory(small("memory=ignore"), SINGLE_RANK, GPU, 2**20) is not None
    assert "the run does not fit in memory" in caplog.text


def test_on_a_gpu_there_is_a_warning_above_80_percent(caplog):
    total = MemoryEstimator(small(), "cuda").estimate(0, 1, 16).total
    check_memory(small(), SINGLE_RANK, GPU, int(total / 0.79))
    assert "in memory" not in caplog.text
    check_memory(small(), SINGLE_RANK, GPU, int(total / 0.81))
    assert "the run may not fit in memory" in caplog.text


def test_a_cpu_is_filled_to_80_percent_including_the_memory_of_the_process(monkeypatch):
    monkeypatch.setattr(memory_check, "process_bytes", lambda: 2**29)
    memory = check_memory(small(), SINGLE_RANK, CPU, 2**40)
    assert memory is not None
    assert memory.process == 2**29 + memory_check.STARTUP_BYTES
    assert check_memory(small(), SINGLE_RANK, CPU, int(memory.total / 0.78)) is not None
    available = int(memory.total / 0.83)
    with pytest.raises(UserError, match=r"is 80% of the memory for each rank, above which the machine may swap"):
        check_memory(small(), SINGLE_RANK, CPU, available)


def test_a_run_that_does_not_fit_writes_nothing(small_run, monkeypatch, tmp_path):
    monkeypatch.setattr("depthlm.training.setup.available_memory", lambda *_: 2**20)
    overrides = [*small_run(), f"output_dir={tmp_path / 'not-made'}", f"data.path={tmp_path / 'no-tokens'}"]
    for dry_run in ("false", "true"):
        with pytest.raises(UserError, match="does not fit in memory"):
            train(depthlm.compose([*overrides, f"dry_run={dry_run}"]))
    assert not (tmp_path / "not-made").exists()
    assert not (tmp_path / "no-tokens").exists()
