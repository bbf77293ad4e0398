"""The settings of a process before its model is built."""

import os
from collections.abc import Iterator

import pytest
import torch

import depthlm
from depthlm.training.setup import compiles, start_process


@pytest.fixture(autouse=True)
def settings_of_the_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the settings after the test."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        # set and deleted, so that the variable that start_process sets is removed after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("depthlm.training.setup.start_logging", lambda rank: None)
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("tf32", [True, False])
def test_what_stays_in_fp32_on_a_gpu_is_multiplied_as_configured(tf32: bool) -> None:
    start_process(depthlm.compose([f"precision.tf32={str(tf32).lower()}", "training.num_threads=1"]))
    assert torch.backends.cuda.matmul.allow_tf32 is tf32


def test_the_gpu_allocator_does_not_fragment_unless_the_user_chose_another_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = depthlm.compose(["training.num_threads=1"])
    start_process(config)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    start_process(config)
    assert "PYTORCH_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize(
    ("choice", "device", "stage", "lack", "compiled"),
    [
        ("auto", "cuda", 0, None, True),
        ("auto", "cuda", 2, None, True),
        ("auto", "cuda", 3, None, False),
        ("auto", "cuda", 0, "Triton needs a C compiler", False),
        ("auto", "cpu", 0, None, False),
        ("true", "cpu", 0, None, True),
        ("false", "cuda", 0, None, False),
    ],
)
def test_sublayers_are_compiled_where_it_helps_or_where_the_user_says_so(
    choice: str,
    device: str,
    stage: int,
    lack: str | None,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = depthlm.compose([f"training.compile={choice}", f"deepspeed=zero{stage}"])
    monkeypatch.setattr("depthlm.training.setup.missing", lambda device: lack)
    assert compiles(config, torch.device(device)) is compiled
    assert (lack is not None) == any(f"not compiled: {lack}" in line for line in caplog.messages)
