"""Checkpoints on the disk: what one is, which are whole, which are kept. `saving.py` writes them.

checkpoints/
  latest                  text: the name of the newest
  step-00000100/
    manifest.json         digest of every file; step, tokens, batches left out, W&B run; ranks, stage, configuration
    model.safetensors     the weights, for every reader but resume
    deepspeed/            weights, optimizer and engine state, for resume
"""

import json
import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from depthlm.config.resolve import CHANGEABLE, LENGTHS
from depthlm.config.saved import compare, saved_config
from depthlm.errors import UserError
from depthlm.files import digest
from depthlm.locations import command

log = logging.getLogger("depthlm")
STATE, WEIGHTS, MANIFEST = "deepspeed", "model.safetensors", "manifest.json"
NEEDED = ("step", "world_size", "stage", "corpus", "config", "files")


class CheckpointError(UserError):
    """A checkpoint that is not whole, or not this run's."""


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where a run directory has the checkpoint of a step."""
    return directory / "checkpoints" / f"step-{step:08d}"


def newest_checkpoint(directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint of a run directory and its manifest; None if it has no checkpoint at all.

    One that is damaged, or another run's, is passed over with a warning that says why. Raises CheckpointError where
    none is left: starting over would overwrite what may be repaired.
    """
    reasons = []
    paths = sorted((directory / "checkpoints").glob("step-*"), reverse=True)
    for path in paths:
        try:
            manifest = read_manifest(path)
            _check_own(path, manifest, saved_config(directory))
            return path, manifest
        except CheckpointError as error:
            reasons.append(str(error))
            log.warning("%s; looking for an older one", error)
    if paths:
        raise CheckpointError(f"{directory}: no checkpoint in it is valid ({reasons[0]}); {retrain(directory)}")
    return None


def retrain(directory: Path) -> str:
    """What to do about a run whose checkpoints are lost."""
    return f"{command('train.py', 'train')} run={directory} resume=retrain trains it again"


def lost(directory: Path, step: int) -> str | None:
    """What is missing of the checkpoint of a step, by the names of its files alone; None: nothing."""
    path = checkpoint_path(directory, step)
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return f"{path / MANIFEST if path.exists() else path} is missing"
    except (OSError, ValueError, TypeError, LookupError) as error:
        return f"{path / MANIFEST} cannot be read ({error})"
    gone = [name for name in files if not (path / name).is_file()]
    return f"{path / gone[0]} is missing" if gone else None


def has_checkpoint(directory: Path, step: int) -> bool:
    """Whether the newest valid checkpoint of a run directory is that of a step, or of a later one."""
    try:
        found = newest_checkpoint(directory)
    except CheckpointError:
        return False
    return found is not None and found[1]["step"] >= step


def checkpoint_of(source: Path, key: str) -> tuple[Path, dict[str, Any]]:
    """A checkpoint itself, or a run directory's newest whole one, and its manifest.

    key: the setting that names the source. Raises UserError where there is none.
    """
    if (source / MANIFEST).exists():
        return source, read_manifest(source)
    try:
        found = newest_checkpoint(source)
    except CheckpointError:
        found = None
    if found is None:
        raise UserError(f"{key}={source}: no whole checkpoint in it; give a run directory, or one of its checkpoints")
    return found


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, every file checked against its digest. Raises CheckpointError."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files, missing = manifest["files"], [name for name in NEEDED if name not in manifest]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: no readable {MANIFEST} ({error})") from None
    if missing:
        raise CheckpointError(f"{path}: {MANIFEST} lacks {', '.join(missing)}")
    there = {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()} - {MANIFEST}
    if gone := sorted(files.keys() - there):
        raise CheckpointError(f"{path}: {gone[0]} is missing")
    # DeepSpeed unpickles what it finds by its name
    if foreign := sorted(there - files.keys()):
        raise CheckpointError(f"{path}: {foreign[0]} is not in its {MANIFEST}, so nobody vouches for it")
    for name, found in _digests(path, files):
        if found != files[name]:
            raise CheckpointError(f"{path}: {name} is not what was saved (its SHA-256 differs)")
    return manifest


def prune(checkpoints: Path, newest: Path, *, keep_last: int, keep_every: int | None, checkpoint_every: int) -> None:
    """Remove what is no longer kept of the folder of checkpoints, of which `newest` was just written.

    Kept: the newest `keep_last`, the multiples of `keep_every`, and the newest multiple of `checkpoint_every`, to which
    a rewind goes.
    """
    steps = {path: int(path.name.removeprefix("step-")) for path in sorted(checkpoints.glob("step-*"))}
    # what is beyond the newest was passed over as damaged, and must not count as one of the last
    whole = [path for path in steps if path <= newest]
    regular = [path for path in whole if steps[path] % checkpoint_every == 0]
    kept = {
        *whole[-keep_last:],
        *regular[-1:],
        *(path for path in whole if keep_every and not steps[path] % keep_every),
    }
    for path in [*(steps.keys() - kept), *checkpoints.glob(".saving-*"), *checkpoints.glob(".universal-*")]:
        shutil.rmtree(path, ignore_errors=True)


def _digests(path: Path, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    with ThreadPoolExecutor(4) as pool:
        yield from zip(names, pool.map(lambda name: digest(path / name), names), strict=True)


def _check_own(path: Path, manifest: dict[str, Any], config: dict[str, Any]) -> None:
    differences = compare(manifest["config"], config)
    foreign = sorted(differences.keys() - CHANGEABLE - {*LENGTHS})
    if foreign:
        raise CheckpointError(f"{path}: it is another run's ({foreign[0]} differs)")
