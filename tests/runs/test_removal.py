"""Removing runs: what is removed, what is kept, and what an interruption leaves."""

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from depthlm.run_directory import RunDirectory
from depthlm.runs import removal
from depthlm.runs.listing import list_runs
from depthlm.runs.removal import LEFTOVER, LOCKED, plan_removal, remove, size_on_disk

from .made_up import root, write_run

__all__ = ["root"]


def add_checkpoint(run: Path, size: int = 100_000) -> Path:
    folder = RunDirectory(run).checkpoint(20)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(os.urandom(size))
    return folder.parent


def test_the_matching_runs_are_removed_and_the_others_are_not(root):
    planned = plan_removal(root, list_runs(root, ["mhc"]), only_checkpoints=False)
    assert [(plan.path, plan.state) for plan in planned] == [
        (root / "default/broken", "failed"),
        (root / "sweep/begun", "stopped"),
    ]
    assert [remove(plan) for plan in planned] == [None, None]
    assert [run.directory for run in list_runs(root)] == ["outputs/default/base", "outputs/sweep/new"]
    assert sorted(path.name for path in (root / "sweep").iterdir()) == ["new"]


def test_runs_are_found_while_a_checkpoint_is_renamed(root, monkeypatch):
    staging = root / "default/base/checkpoints/.saving-step-00000020/deepspeed"
    staging.mkdir(parents=True)
    scandir = os.scandir

    def rename_and_scan(path: Any = ".") -> Any:
        if path in (staging, str(staging)) and staging.exists():
            staging.parent.rename(staging.parent.with_name("step-00000020"))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", rename_and_scan)
    runs = list_runs(root)
    assert len(runs) == 4
    assert not staging.exists()
    (root / "default/base/checkpoints/step-00000020").rename(root / "default/base/checkpoints/step-00000010")
    staging.mkdir(parents=True)
    assert len(plan_removal(root, runs, only_checkpoints=False)) == 4
    assert not staging.exists()


def test_results_are_kept_where_only_checkpoints_are_removed(root):
    checkpoints = add_checkpoint(root / "default/base")
    names = {path.name for path in (root / "default/base").iterdir()}
    (plan,) = plan_removal(root, list_runs(root, ["default"]), only_checkpoints=True)
    assert plan.path == checkpoints
    assert plan.size >= 100_000
    assert remove(plan) is None
    assert {path.name for path in (root / "default/base").iterdir()} - {".lock"} == names - {"checkpoints"}
    assert list_runs(root, ["state=complete"])[0].validation_loss == 2.5


def test_a_run_in_which_a_process_trains_is_kept(root):
    runs = list_runs(root)
    (free,) = [plan for plan in plan_removal(root, runs, False) if plan.path.name == "base"]
    with (root / "default/base/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (locked,) = [plan for plan in plan_removal(root, runs, False) if plan.path.name == "base"]
        assert locked.kept == LOCKED
        # a process that has locked it since the plan was made
        assert remove(free) == LOCKED
    assert (root / "default/base/summary.json").exists()
    assert remove(locked) == LOCKED


def test_a_folder_that_is_not_a_run_and_the_folder_of_the_runs_itself_are_kept(root):
    (root / "other").mkdir()
    for content in ("a: 1\n", "- 1\n", "model: [", "model: mhc\nsize: tiny\n"):
        (root / "other/config.yaml").write_text(content)
        (plan,) = plan_removal(root, list_runs(root, ["other"]), only_checkpoints=False)
        assert plan.kept is not None
        assert "not that of a run" in plan.kept
        assert remove(plan) == plan.kept
        assert (root / "other/config.yaml").exists()
    (plan,) = plan_removal(root / "sweep/new", list_runs(root / "sweep/new"), only_checkpoints=False)
    assert plan.kept is not None
    assert "--root" in plan.kept


def test_a_run_that_contains_another_run_is_kept(root):
    write_run(root, "default/base/inner")
    planned = {plan.path: plan.kept for plan in plan_removal(root, list_runs(root, ["base"]), False)}
    assert planned == {
        root / "default/base": "it contains another run, outputs/default/base/inner",
        root / "default/base/inner": None,
    }


def test_what_links_point_to_is_kept(root, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "weights").write_text("1")
    run = root / "sweep/begun"
    (run / "checkpoints").symlink_to(outside)
    (run / "file").symlink_to(outside / "weights")
    (plan,) = plan_removal(root, list_runs(root, ["begun"]), only_checkpoints=True)
    assert plan.kept == "it is a symbolic link"
    (plan,) = plan_removal(root, list_runs(root, ["begun"]), only_checkpoints=False)
    assert remove(plan) is None
    assert not run.exists()
    assert (outside / "weights").read_text() == "1"


@pytest.mark.parametrize("only_checkpoints", [False, True])
def test_an_interrupted_removal_leaves_no_run_and_the_next_one_removes_the_rest(root, monkeypatch, only_checkpoints):
    run = root / "default/base"
    checkpoints = add_checkpoint(run)
    (plan,) = plan_removal(root, list_runs(root, ["base"]), only_checkpoints)

    def interrupted(path: Path) -> None:
        # a part of the content is gone, in the order of the directory
        next(file for file in sorted(path.rglob("*")) if file.is_file()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            remove(plan)
    assert not checkpoints.exists()
    assert run.exists() == only_checkpoints
    assert len(list_runs(root)) == 3 + only_checkpoints
    (leftover,) = plan_removal(root, [], only_checkpoints=False)
    assert leftover.state == LEFTOVER
    assert remove(leftover) is None
    assert not leftover.path.exists()
    assert plan_removal(root, [], only_checkpoints=False) == []
    assert remove(leftover) is None


def test_the_size_counts_each_file_once_and_no_file_behind_a_link(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    before = size_on_disk(tmp_path / "a")
    (tmp_path / "large").write_bytes(os.urandom(1_000_000))
    (tmp_path / "a/link").symlink_to(tmp_path / "large")
    (tmp_path / "a/folder").symlink_to(tmp_path)
    assert size_on_disk(tmp_path / "a") < before + 100_000
    (tmp_path / "a/b/file").write_bytes(os.urandom(500_000))
    os.link(tmp_path / "a/b/file", tmp_path / "a/same")
    assert 500_000 <= size_on_disk(tmp_path / "a") < before + 700_000
    assert removal.size_on_disk(tmp_path / "none") == 0
