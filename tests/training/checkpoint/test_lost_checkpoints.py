"""A run whose checkpoints are gone keeps its metrics; one that never had a checkpoint starts again."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import depthlm
from depthlm.errors import UserError
from depthlm.training import train

from ..run_files import assert_same, curve, weights
from ..spoiled import train_spoiled

Overrides = Callable[..., list[str]]


def remove_folder(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def remove_content(run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def kept(run: Path) -> dict[str, bytes]:
    """Return the files of a run that a refused command does not change."""
    return {file.name: file.read_bytes() for file in run.glob("[!.]*.*") if file.name != "failure.json"}


@pytest.mark.parametrize("remove", [remove_folder, remove_content])
def test_a_run_whose_checkpoints_are_gone_is_trained_again_only_on_request(
    small_run: Overrides, tmp_path: Path, remove: Callable[[Path], None]
) -> None:
    run, overrides = tmp_path / "run", small_run("training.max_steps=5")
    assert train(depthlm.compose([*overrides, "training.stop_after=3"])) == 0
    remove(run)
    before = kept(run)
    with pytest.raises(UserError, match=rf"{run}: no checkpoint in it; .* run={run} resume=retrain"):
        train(depthlm.compose(overrides))
    assert kept(run) == before
    # a retrained run that is killed before its first checkpoint has nothing to lose
    assert train_spoiled([*overrides, "resume=retrain"], {}, killed_at=3) == "killed"
    assert train(depthlm.compose(overrides)) == 0
    assert train(depthlm.compose(small_run("training.max_steps=5", name="straight"))) == 0
    assert curve(run) == curve(tmp_path / "straight")
    assert_same(weights(run), weights(tmp_path / "straight"))


def test_a_complete_run_whose_checkpoints_are_gone_is_not_extended_from_scratch(
    small_run: Overrides, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert train(depthlm.compose(small_run("training.max_steps=3"))) == 0
    remove_folder(run)
    before = kept(run)
    with pytest.raises(UserError, match="no checkpoint in it; "):
        train(depthlm.compose(small_run("training.max_steps=5", "resume=extend")))
    assert kept(run) == before


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(small_run: Overrides, tmp_path: Path) -> None:
    overrides = small_run("training.max_steps=5", "training.checkpoint_every=4")
    assert train_spoiled(overrides, {}, killed_at=4) == "killed"
    assert len(curve(tmp_path / "run")) == 3
    (tmp_path / "run/checkpoints/.saving-step-00000004").mkdir(parents=True)
    assert train(depthlm.compose(overrides)) == 0
    assert len(curve(tmp_path / "run")) == 5


def test_another_configuration_is_refused_where_the_checkpoints_are_gone(small_run: Overrides, tmp_path: Path) -> None:
    assert train(depthlm.compose(small_run("training.stop_after=3"))) == 0
    remove_folder(tmp_path / "run")
    with pytest.raises(UserError, match="holds a run with another configuration"):
        train(depthlm.compose(small_run("optimizer.lr=0.5", "resume=retrain")))
