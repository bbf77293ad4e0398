"""Loading a run that is being trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from depthlm.build import load_checkpoint, with_weights
from depthlm.files import digest
from depthlm.runs.manifest import seal

from .hugging_face.conftest import make_run

__all__ = ["make_run"]


def replace_by_the_next(checkpoint: Path) -> None:
    """Write the checkpoint of the next step and remove this one, as training does."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["step"] += 1
    new = checkpoint.with_name(f"step-{manifest['step']:08d}")
    shutil.copytree(checkpoint, new)
    (new / "manifest.json").write_text(json.dumps(seal(manifest)))
    shutil.rmtree(checkpoint)


@pytest.mark.parametrize("moment", ["verifying", "loading"])
def test_a_checkpoint_that_training_removes_meanwhile_gives_way_to_the_newest(make_run, monkeypatch, moment):
    run, removed = make_run(), []

    def remove_once() -> None:
        if not removed:
            removed.append(run / "checkpoints/step-00000001")
            replace_by_the_next(removed[0])

    def verify(file: Path) -> str:
        if moment == "verifying":
            remove_once()
        return digest(file)

    def load(*arguments: Any) -> Any:
        if moment == "loading":
            remove_once()
        return with_weights(*arguments)

    monkeypatch.setattr("depthlm.runs.checkpoints.digest", verify)
    monkeypatch.setattr("depthlm.build.with_weights", load)
    assert load_checkpoint(run)[2].step == 2
