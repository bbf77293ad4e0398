"""Checkpoints on disk: their layout, validation and retention. `saving.py` writes them.

checkpoints/
  latest                  text: the name of the newest checkpoint
  step-00000100/
    manifest.json         hash of every file, and of itself; progress; ranks, stage, configuration
    model.safetensors     the weights, for all uses except resuming
    deepspeed/            weights, optimizer and engine state, for resuming
"""

import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from depthlm.config.keys import on_resume
from depthlm.config.resolve import LENGTHS
from depthlm.config.saved import compare, load_config
from depthlm.errors import UserError
from depthlm.files import digest, is_inside
from depthlm.locations import command
from depthlm.run_directory import MANIFEST, RunDirectory, is_checkpoint, step_of
from depthlm.runs.manifest import CheckpointError, Manifest, parse_manifest

log = logging.getLogger("depthlm")
STATE, WEIGHTS = "deepspeed", "model.safetensors"


def newest_checkpoint(directory: Path) -> tuple[Path, Manifest] | None:
    """Return the newest valid checkpoint of a run directory and its manifest; None if there never was a checkpoint.

    A checkpoint that is damaged or belongs to another run is ignored, with a warning that gives the reason.

    Raises CheckpointError if there were checkpoints but none is valid: starting from scratch would overwrite them and
    the metrics, although they may be repairable.
    """
    reasons = []
    paths = RunDirectory(directory).checkpoint_folders()
    for path in paths:
        try:
            manifest = read_manifest(path)
            _check_config(path, manifest, asdict(load_config(directory)))
            return path, manifest
        except CheckpointError as error:
            reasons.append(str(error))
            log.warning("%s; looking for an older one", error)
    if RunDirectory(directory).checkpoint_folders() != paths:
        # a process that trains has replaced them meanwhile
        return newest_checkpoint(directory)
    if paths:
        raise CheckpointError(f"{directory}: no checkpoint in it is valid ({reasons[0]}); {retrain(directory)}")
    if RunDirectory(directory).saved.exists():
        raise CheckpointError(
            f"{directory}: no checkpoint in it; {retrain(directory)} from scratch; if its checkpoints were moved, move "
            "them back to resume it"
        )
    return None


def retrain(directory: Path) -> str:
    """Return the advice for a run whose checkpoints are lost."""
    return f"{command('train.py', 'train')} run={directory} resume=retrain trains it again"


def missing_part(directory: Path, step: int) -> str | None:
    """Return the missing part of the checkpoint of a step, or None; checks only that its files exist."""
    path = RunDirectory(directory).checkpoint(step)
    if not (path / MANIFEST).is_file():
        return f"{path / MANIFEST if path.exists() else path} is missing"
    try:
        files = parse_manifest(path).files
    except CheckpointError as error:
        return str(error)
    missing = [name for name in files if not (path / name).is_file()]
    return f"{path / missing[0]} is missing" if missing else None


def has_checkpoint(directory: Path, step: int) -> bool:
    """Return whether the newest valid checkpoint of a run directory is of this step or a later one."""
    try:
        checkpoint = newest_checkpoint(directory)
    except CheckpointError:
        return False
    return checkpoint is not None and checkpoint[1].step >= step


def checkpoint_of(source: Path, key: str) -> tuple[Path, Manifest]:
    """Return the checkpoint at `source`, or the newest valid one of that run directory, and its manifest.

    key: the setting that names the source, for the message. Raises UserError if there is no such checkpoint.
    """
    if is_checkpoint(source):
        return source, read_manifest(source)
    try:
        checkpoint = newest_checkpoint(source)
    except CheckpointError:
        checkpoint = None
    if checkpoint is None:
        raise UserError(f"{key}={source}: no complete checkpoint in it; give a run directory or one of its checkpoints")
    return checkpoint


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint after verifying it and the hash of every file. Raises CheckpointError."""
    manifest = parse_manifest(path)
    files = manifest.files
    # a link to a folder counts as a file, so that it is refused
    everything = [file for file in path.rglob("*") if file.is_symlink() or not file.is_dir()]
    existing = {str(file.relative_to(path)) for file in everything} - {MANIFEST}
    if absent := sorted(files.keys() - existing):
        raise CheckpointError(f"{path}: {absent[0]} is missing")
    # DeepSpeed finds files by name and unpickles them, so an unlisted file could execute code
    if foreign := sorted(existing - files.keys()):
        raise CheckpointError(f"{path}: {foreign[0]} is not listed in its {MANIFEST}, so it cannot be trusted")
    if outside := sorted(str(file.relative_to(path)) for file in everything if not is_inside(file, path)):
        raise CheckpointError(f"{path}: {outside[0]} is a link to a file outside of the checkpoint")
    try:
        with ThreadPoolExecutor(4) as pool:
            digests = list(pool.map(lambda name: digest(path / name), files))
    except OSError as error:
        raise CheckpointError(f"{path}: a file of it cannot be read ({error})") from None
    if changed := [name for name, found in zip(files, digests, strict=True) if found != files[name]]:
        raise CheckpointError(f"{path}: {changed[0]} is not what was saved (its SHA-256 differs)")
    return manifest


def prune(directory: Path, newest: Path, *, keep_last: int, keep_every: int | None, checkpoint_every: int) -> None:
    """Delete the checkpoints of a run that are no longer retained, after `newest` was written.

    Retained are the newest `keep_last`, the multiples of `keep_every`, and the newest multiple of `checkpoint_every`,
    which is the target of a rewind.
    """
    run = RunDirectory(directory)
    steps = {path: step_of(path) or 0 for path in reversed(run.checkpoint_folders())}
    # a checkpoint beyond the newest was rejected as damaged, and must not count towards keep_last
    valid = [path for path in steps if steps[path] <= (step_of(newest) or 0)]
    regular = [path for path in valid if steps[path] % checkpoint_every == 0]
    kept = {
        *valid[-keep_last:],
        *regular[-1:],
        *(path for path in valid if keep_every and not steps[path] % keep_every),
    }
    for path in steps.keys() - kept:
        shutil.rmtree(path, ignore_errors=True)
    remove_leftovers(run)


def remove_leftovers(run: RunDirectory) -> None:
    """Delete what an interrupted save has left, which may be what fills the disk."""
    for path in run.leftovers():
        shutil.rmtree(path, ignore_errors=True)


def _check_config(path: Path, manifest: Manifest, config: dict[str, Any]) -> None:
    differences = compare(manifest.config, config)
    foreign = sorted(name for name in differences if on_resume(name) == "fixed" and name not in LENGTHS)
    if foreign:
        raise CheckpointError(f"{path}: it belongs to another run ({foreign[0]} differs)")
