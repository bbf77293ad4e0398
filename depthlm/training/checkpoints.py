"""Checkpoints that exist when their manifest does: written aside, synced, renamed, then pointed to by `latest`.

checkpoints/
  latest                  text: the name of the newest
  step-00000100/
    manifest.json         digest of every file; step, tokens, skipped batches, W&B run
    model.safetensors     the weights, for every reader but resume
    deepspeed/            weights, optimizer and engine state, for resume
"""

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from depthlm.errors import UserError
from depthlm.files import replace_text, sync
from depthlm.training.sharding import whole_weights

log = logging.getLogger("depthlm")
STATE = "deepspeed"


class CheckpointError(UserError):
    """A checkpoint that is not whole."""


def save_checkpoint(engine: Any, directory: Path, state: dict[str, Any], keep_last: int) -> Path:
    """Write `checkpoints/step-<state["step"]>`; collective, every rank calls it. Returns its path.

    state: what the loop needs to go on; it goes into the manifest.
    """
    checkpoints = directory / "checkpoints"
    final = checkpoints / f"step-{state['step']:08d}"
    aside = checkpoints / f".saving-{final.name}"
    first = torch.distributed.get_rank() == 0
    if first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    torch.distributed.barrier()
    engine.save_checkpoint(str(aside), tag=STATE, save_latest=False)
    weights = whole_weights(engine)
    if first:
        save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
    torch.distributed.barrier()
    if first:
        files = {str(file.relative_to(aside)): _digest(file) for file in sorted(aside.rglob("*")) if file.is_file()}
        replace_text(aside / "manifest.json", json.dumps({**state, "files": files}, indent=1))
        for file in files:
            sync(aside / file)
        for folder in (aside / STATE, aside):
            sync(folder)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(aside, final)
        sync(checkpoints)
        replace_text(checkpoints / "latest", final.name + "\n")
        sync(checkpoints)
        _prune(checkpoints, final, keep_last)
    torch.distributed.barrier()
    return final


def newest_checkpoint(directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint of a run directory and its manifest; None if it has no checkpoint at all.

    A damaged one is passed over with a warning that says what is wrong with it. Raises CheckpointError where none of
    them is whole: starting over would overwrite what may be mended.
    """
    paths = sorted((directory / "checkpoints").glob("step-*"), reverse=True)
    for path in paths:
        try:
            return path, read_manifest(path)
        except CheckpointError as error:
            log.warning("%s; looking for an older one", error)
    if paths:
        raise CheckpointError(f"{directory}: none of its checkpoints is whole; remove {paths[0].parent} to start over")
    return None


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, every file checked against its digest. Raises CheckpointError."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        files = manifest["files"]
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise CheckpointError(f"{path}: no readable manifest.json ({error})") from None
    for name, digest in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path}: {name} is missing")
        if _digest(file) != digest:
            raise CheckpointError(f"{path}: {name} is not what was saved (its SHA-256 differs)")
    return manifest


def load_engine(engine: Any, path: Path) -> None:
    """Bring weights, optimizer and engine back from a whole checkpoint; collective. Raises CheckpointError."""
    loaded, _ = engine.load_checkpoint(str(path), tag=STATE)
    if loaded is None:
        raise CheckpointError(f"{path}: DeepSpeed found no state in it")


def _prune(checkpoints: Path, newest: Path, keep_last: int) -> None:
    steps = sorted(checkpoints.glob("step-*"))
    # what is beyond the newest was passed over as damaged, and must not count as one of the last
    beyond = steps[steps.index(newest) + 1 :]
    for old in [*beyond, *steps[: steps.index(newest) + 1][:-keep_last]]:
        shutil.rmtree(old, ignore_errors=True)
    for left_over in checkpoints.glob(".saving-*"):
        shutil.rmtree(left_over, ignore_errors=True)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
