"""A process writes only into the run directory that it has locked, and only while that is still the same directory."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import depthlm
from depthlm.errors import UserError
from depthlm.files import replace_text, replacing
from depthlm.run_directory import RunDirectory
from depthlm.runs.directory import special_file
from depthlm.runs.records import FAILED, STOPPED, read_run
from depthlm.training import train, trainer

Overrides = Callable[..., list[str]]


def remove(run: Path) -> None:
    shutil.rmtree(run)


def replace(run: Path) -> None:
    """Move the directory away, and put another run there."""
    run.rename(run.with_name("moved"))
    run.mkdir()
    (run / ".lock").touch()
    (run / "metrics.jsonl").write_text("of another run")


@pytest.mark.parametrize(("disturb", "when"), [(remove, "train_step"), (replace, "validate")])
def test_a_run_whose_directory_goes_away_ends_and_writes_nothing_there(
    small_run, tmp_path, monkeypatch, capsys, disturb, when
):
    run, function, calls = tmp_path / "run", getattr(trainer, when), []

    def disturbed(*arguments: object, **settings: object) -> object:
        calls.append(0)
        if len(calls) == 2:
            disturb(run)
        return function(*arguments, **settings)

    monkeypatch.setattr(trainer, when, disturbed)
    overrides = small_run("training.max_steps=9", "training.validate_every=2", "training.checkpoint_every=1")
    assert train(depthlm.compose(overrides)) == 1
    assert f"{run} was removed or replaced while this run trained in it" in capsys.readouterr().out
    if disturb is remove:
        assert not run.exists()
    else:
        assert {file.name for file in run.iterdir()} == {".lock", "metrics.jsonl"}
        assert (run / "metrics.jsonl").read_text() == "of another run"


def test_a_complete_run_with_torn_rows_stays_complete(small_run, tmp_path):
    overrides = small_run("training.max_steps=6")
    assert train(depthlm.compose([*overrides, "training.stop_after=4"])) == 0
    metrics = tmp_path / "run/metrics.jsonl"
    rows = metrics.read_text().splitlines()
    metrics.write_text("\n".join([rows[0], rows[1][:9], "[]", "\x00", *rows[2:]]) + "\n")
    assert train(depthlm.compose(overrides)) == 0
    assert [row["step"] for row in read_run(tmp_path / "run").rows] == [1, 3, 4, 5, 6]
    assert (tmp_path / "run/loss.png").exists()


def contents(run: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of the last change of every file and folder."""
    stats = {str(path): os.stat(path) for path in [run, *run.rglob("*")]}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def test_a_refused_command_changes_nothing_in_the_run_and_a_failed_attempt_is_recorded(
    small_run, tmp_path, monkeypatch
):
    run, overrides = tmp_path / "run", small_run("training.max_steps=4")
    assert train(depthlm.compose([*overrides, "training.stop_after=2"])) == 0
    before = contents(run)
    with pytest.raises(UserError, match="holds a run with another configuration"):
        train(depthlm.compose([*overrides, "optimizer.lr=0.5"]))
    with pytest.raises(UserError, match="resume=never"):
        train(depthlm.compose([*overrides, "resume=never"]))
    with pytest.raises(UserError, match=r"data.revision=caf\\udce9: must be UTF-8, for config.yaml"):
        train(depthlm.compose([*overrides, "data.revision='caf\udce9'"]))
    assert contents(run) == before
    assert read_run(run).state == STOPPED

    def fail(*_: object, **__: object) -> None:
        raise ValueError("out of luck")

    monkeypatch.setattr(trainer, "train_step", fail)
    with pytest.raises(ValueError, match="out of luck"):
        train(depthlm.compose(overrides))
    assert json.loads((run / "failure.json").read_text())["error"] == "ValueError: out of luck"
    assert read_run(run).state == FAILED


def test_a_folder_with_files_of_the_user_is_not_used_as_a_run_directory(small_run, tmp_path):
    config, folder = depthlm.compose(small_run()), tmp_path / "run"
    for name in ("config.yaml", "tokenizer.json", "metrics.jsonl", "loss.png", "failure.json", "checkpoints"):
        file = folder / name / "of mine" if name == "checkpoints" else folder / name
        file.parent.mkdir(parents=True)
        file.write_text("mine: 1\n")
        (folder / "notes.txt").write_text("mine")
        before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        with pytest.raises(UserError, match=rf"output_dir=.*run: this is no run directory, and .* overwrite {name} in"):
            train(config)
        assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
        shutil.rmtree(folder)


def test_other_files_of_the_user_in_a_run_directory_are_kept(small_run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/slurm-1.log").write_text("mine")
    assert train(depthlm.compose(small_run("training.max_steps=2"))) == 0
    # a copy without hidden files is still a run
    (tmp_path / "run/.lock").unlink()
    assert train(depthlm.compose(small_run("training.max_steps=2"))) == 0
    assert (tmp_path / "run/slurm-1.log").read_text() == "mine"


def test_links_to_files_are_not_followed(small_run, tmp_path):
    run, theirs = RunDirectory(tmp_path / "run"), tmp_path / "theirs"
    theirs.write_text("text")
    run.path.mkdir()
    # a folder on another disk is fine
    (tmp_path / "disk").mkdir()
    run.checkpoints.symlink_to(tmp_path / "disk")
    for file in (run.metrics, run.lock):
        file.symlink_to(theirs)
        with pytest.raises(UserError, match=rf"you did not train this run .* {file.name} in it is a link to a file"):
            train(depthlm.compose(small_run()))
        file.unlink()
    for replace in (lambda: replace_text(run.latest, "new"), lambda: write_picture(run.loss_curve)):
        for name in (".latest.tmp", ".loss.tmp.png"):
            (tmp_path / "disk" / name).unlink(missing_ok=True)
            (tmp_path / "disk" / name).symlink_to(theirs)
            (run.path / name).unlink(missing_ok=True)
            (run.path / name).symlink_to(theirs)
        replace()
    assert (theirs.read_text(), run.latest.read_text(), run.loss_curve.read_text()) == ("text", "new", "new")


def write_picture(file: Path) -> None:
    with replacing(file) as place:
        place.write_text("new")


def test_a_run_directory_with_a_pipe_or_a_device_is_refused(small_run, tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    assert special_file(run) is None
    for file in run.written:
        file.parent.mkdir(exist_ok=True)
        os.mkfifo(file)
        assert special_file(run) == file
        file.unlink()
    for make in (os.mkfifo, lambda file: file.symlink_to("/dev/zero")):
        make(run.metrics)
        with pytest.raises(UserError, match=r"metrics\.jsonl is neither a file nor a folder.*remove it"):
            train(depthlm.compose(small_run()))
        run.metrics.unlink()
