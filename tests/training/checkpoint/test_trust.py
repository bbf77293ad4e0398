"""No untrusted code runs: files are read as data, and pickles are loaded only if a manifest lists their digests."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import depthlm
from depthlm.errors import UserError
from depthlm.files import digest
from depthlm.runs.checkpoints import read_manifest
from depthlm.runs.manifest import CheckpointError, seal
from depthlm.training import train

from ..run_files import TrainRun


class Intruder:
    """Creates a directory when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def run(trained: TrainRun, tmp_path: Path) -> Path:
    """A run at ZeRO 1 with checkpoints of steps 2 and 4, whose pickles are all replaced by an intruder."""
    directory = trained("deepspeed=zero1", "training.max_steps=4", "training.checkpoint_every=2")
    pickles = list((directory / "checkpoints").rglob("*.pt"))
    assert len(pickles) == 4
    for file in pickles:
        file.write_bytes(pickle.dumps(Intruder(tmp_path / "trace")))
    return directory


def vouch(run: Path) -> None:
    """Write the digests of the files in the checkpoints to their manifests."""
    for path in run.glob("checkpoints/step-*"):
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"] = {name: digest(path / name) for name in manifest["files"]}
        (path / "manifest.json").write_text(json.dumps(seal(manifest)))


def test_resuming_and_forking_unpickle_only_files_listed_in_a_manifest(run, small_run, tmp_path):
    (run / "summary.json").unlink()
    same = ("deepspeed=zero1", "training.max_steps=4", "training.checkpoint_every=2")
    for overrides in (small_run(*same), small_run(*same, f"fork_from={run}", name="fork")):
        with pytest.raises(UserError, match=r"no checkpoint in it is valid|no complete checkpoint in it"):
            train(depthlm.compose(overrides))
    assert not (tmp_path / "trace").exists()
    vouch(run)
    with pytest.raises(RuntimeError, match="corrupt file"):
        train(depthlm.compose(small_run(*same)))
    assert (tmp_path / "trace").exists()


def test_loading_and_init_from_never_unpickle(run, train_run, tmp_path):
    vouch(run)
    depthlm.load(run)
    train_run("training.max_steps=1", f"init_from={run}", name="next")
    assert not (tmp_path / "trace").exists()


def test_a_configuration_is_read_as_data_and_its_interpolations_are_text(run, tmp_path, monkeypatch):
    vouch(run)
    monkeypatch.setenv("SECRET", "known only to the user")
    text = (run / "config.yaml").read_text()
    tagged = (f"x: !!python/object/apply:os.mkdir ['{tmp_path}/trace']", "y: !!python/name:os.system")
    for line in (*tagged, "x: &x [1]\ny: *x"):
        (run / "config.yaml").write_text(f"{text}\n{line}\n")
        with pytest.raises(UserError, match=r"config\.yaml cannot be read"):
            depthlm.load(run)
    (run / "config.yaml").write_text(f"{text}\nunknown: 1\n")
    with pytest.raises(UserError, match=r"(?s)not the configuration of a run.*unknown"):
        depthlm.load(run)
    (run / "config.yaml").write_text(text.replace("project: depthlm", "project: ${oc.env:SECRET}"))
    assert depthlm.load(run)[1].tracker.project == "${oc.env:SECRET}"
    assert depthlm.compose([f"run={run}", "training.log_every=3", "trust=run"]).tracker.project == "${oc.env:SECRET}"
    assert not (tmp_path / "trace").exists()


def test_a_changed_configuration_is_validated_and_compared_with_that_of_each_checkpoint(run):
    vouch(run)
    file = run / "config.yaml"
    text = file.read_text()
    file.write_text(text.replace("project: depthlm", "project: another"))
    assert depthlm.load(run)[1].tracker.project == "another"
    file.write_text(re.sub("log_every: .*", "log_every: -10", text))
    with pytest.raises(UserError, match=r"run/config\.yaml: training\.log_every=-10: must be"):
        depthlm.load(run)
    file.write_text(re.sub("norm_eps: .*", "norm_eps: 0.5", text))
    with pytest.raises(UserError, match=r"no checkpoint in it is valid .*norm_eps differs"):
        depthlm.load(run)


def test_files_outside_of_a_checkpoint_are_refused(run, tmp_path):
    vouch(run)
    for name in ("model.safetensors", "deepspeed"):
        part = run / "checkpoints/step-00000004" / name
        part.rename(tmp_path / name)
        part.symlink_to(tmp_path / name)
        with pytest.raises(CheckpointError, match=r"outside of the checkpoint|is missing"):
            read_manifest(part.parent)
        part.unlink()
        (tmp_path / name).rename(part)
        assert read_manifest(part.parent).step == 4


def test_links_into_the_blobs_of_a_cache_are_followed(run, tmp_path):
    vouch(run)
    blobs, snapshot = tmp_path / "hub/blobs", tmp_path / "hub/snapshots/revision"
    shutil.copytree(run, snapshot)
    blobs.mkdir()
    for number, file in enumerate(file for file in snapshot.rglob("*") if file.is_file()):
        file.rename(blobs / str(number))
        file.symlink_to(os.path.relpath(blobs / str(number), file.parent))
    assert depthlm.load(snapshot)[1].model.name == "vanilla"
    # but not where the folder of the blobs is a link itself
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link to a file outside"):
        depthlm.load(snapshot)
