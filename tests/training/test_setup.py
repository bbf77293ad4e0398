"""The settings of a process before its model is built, and ranks that would train different runs."""

import os
import shutil
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch

import depthlm
from depthlm.data import prepare
from depthlm.training import setup
from depthlm.training.setup import compiles, start_process

from ..options import composed
from ..two_ranks import train_on_ranks


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


def test_what_stays_in_fp32_on_a_gpu_is_multiplied_as_configured():
    for tf32 in (True, False):
        start_process(depthlm.compose([f"precision.tf32={str(tf32).lower()}", "training.num_threads=1"]))
        assert torch.backends.cuda.matmul.allow_tf32 is tf32


def test_the_gpu_allocator_does_not_fragment_unless_the_user_chose_another_setting(monkeypatch):
    config = depthlm.compose(["training.num_threads=1"])
    start_process(config)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    start_process(config)
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_sublayers_are_compiled_where_it_helps_or_where_the_user_says_so(monkeypatch, caplog):
    for choice, device, stage, lack, compiled in (
        ("auto", "cuda", 2, None, True),
        ("auto", "cuda", 3, None, False),
        ("auto", "cuda", 2, "Triton needs a C compiler", False),
        ("auto", "cpu", 2, None, False),
        ("true", "cpu", 2, None, True),
        ("false", "cuda", 2, None, False),
    ):
        config = composed(f"training.compile={choice}", f"deepspeed=zero{stage}")
        monkeypatch.setattr("depthlm.training.setup.missing", lambda device, lack=lack: lack)
        caplog.clear()
        assert compiles(config, torch.device(device)) is compiled
        assert (lack is not None) == any(f"not compiled: {lack}" in line for line in caplog.messages)


def train_with_others(overrides: list[str], others: Sequence[str]) -> int | str:
    """Train, with further overrides on rank 1."""
    return train_on_ranks([*overrides, *others] if torch.distributed.get_rank() == 1 else overrides)


def train_with_other_code(overrides: list[str]) -> int | str:
    """Train, with other code on rank 1."""
    code = "changed" if torch.distributed.get_rank() == 1 else "original"
    with mock.patch.object(setup, "digest", lambda files: code if len([*files]) > 1 else "same"):
        return train_on_ranks(overrides)


def test_a_rank_with_another_setting_or_other_code_is_named(two_ranks, small_run, tmp_path):
    others = ["optimizer.lr=0.5", "training.checkpoint_every=3", "model=mhc"]
    for message in two_ranks(train_with_others, small_run(), others):
        assert message.startswith("the ranks would train different runs:\n  - rank 1 on ")
        for difference in (
            "optimizer.lr is 0.5, and on rank 0 0.003", "training.checkpoint_every is 3, and on rank 0 10",
            "model.connection.iterations is 20, and on rank 0 missing",
        ):  # fmt: skip
            assert difference in message
    for message in two_ranks(train_with_other_code, small_run()):
        assert "the code of depthlm is changed, and on rank 0 original\nStart all ranks" in message
    assert not (tmp_path / "run").exists()


def test_a_rank_may_have_its_own_copy_of_the_token_files_but_no_others(two_ranks, small_run, tmp_path, corpus_folder):
    text = shutil.copytree(corpus_folder, tmp_path / "text")
    overrides = small_run("training.max_steps=2", f"data.source={text}", f"data.path={tmp_path}/tokens")
    prepare(depthlm.compose(overrides).data)
    shutil.copytree(tmp_path / "tokens", tmp_path / "copy")
    assert two_ranks(train_with_others, overrides, [f"data.path={tmp_path}/copy"]) == [0, 0]
    (text / "text-00.txt").write_text((text / "text-00.txt").read_text().upper())
    prepare(depthlm.compose([*overrides, f"data.path={tmp_path}/other"]).data)
    (tmp_path / "run").rename(tmp_path / "done")
    for message in two_ranks(train_with_others, overrides, [f"data.path={tmp_path}/other"]):
        assert "the digest of the token files of local is " in message
    assert not (tmp_path / "run").exists()
