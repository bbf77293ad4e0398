"""Ranks that would train different runs are refused before the first step, with the rank and what differs."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import depthlm
from depthlm.data import prepare
from depthlm.training import agreement

from ..two_ranks import TwoRanks, train_on_ranks


def train_with_others(overrides: list[str], others: Sequence[str]) -> int | str:
    """Train, with further overrides on rank 1."""
    return train_on_ranks([*overrides, *others] if torch.distributed.get_rank() == 1 else overrides)


def train_with_other_code(overrides: list[str]) -> int | str:
    """Train, with other code on rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == 1:
            patch.setattr(agreement, "digest", lambda files: "changed" if len([*files]) > 1 else "same")
        else:
            patch.setattr(agreement, "digest", lambda files: "original" if len([*files]) > 1 else "same")
        return train_on_ranks(overrides)


@pytest.mark.parametrize(
    ("others", "difference"),
    [
        (["optimizer.lr=0.5"], "optimizer.lr is 0.5, and on rank 0 0.003"),
        (["seed=2"], "seed is 2, and on rank 0 1"),
        (["training.checkpoint_every=3"], "training.checkpoint_every is 3, and on rank 0 10"),
        (["model=mhc"], "model.connection.iterations is 20, and on rank 0 missing"),
    ],
)
def test_a_rank_with_another_setting_is_named(
    two_ranks: TwoRanks, small_run: Callable[..., list[str]], tmp_path: Path, others: list[str], difference: str
) -> None:
    messages = two_ranks(train_with_others, small_run(), others)
    for message in messages:
        assert message.startswith("the ranks would train different runs:\n  - rank 1 on ")
        assert difference in message
    assert not (tmp_path / "run").exists()


def test_a_rank_with_other_code_is_named(
    two_ranks: TwoRanks, small_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    for message in two_ranks(train_with_other_code, small_run()):
        assert "the code of depthlm is changed, and on rank 0 original\nStart all ranks" in message
    assert not (tmp_path / "run").exists()


def test_a_rank_may_have_its_own_copy_of_the_token_files_but_no_others(
    two_ranks: TwoRanks, small_run: Callable[..., list[str]], tmp_path: Path, corpus_folder: Path
) -> None:
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
