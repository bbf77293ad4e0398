"""Checkpoints on disk: their layout, validation and retention. `saving.py` writes them.

checkpoints/
  latest                  text: the name of the newest checkpoint
  step-00000100/
    manifest.json         hash of every file; step, tokens, skipped batches, W&B run; ranks, stage, configuration
    model.safetensors     the weights, for all uses except resuming
    deepspeed/            weights, optimizer and engine state, for resuming
"""

import json
import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from depthlm.config.renamed import use_new_names
from depthlm.config.resolve import LENGTHS
from depthlm.config.saved import compare, saved_config
from depthlm.config.schema.keys import on_resume
from depthlm.errors import UserError
from depthlm.files import digest
from depthlm.locations import command
from depthlm.run_directory import MANIFEST, RunDirectory, is_checkpoint

log = logging.getLogger("depthlm")
STATE, WEIGHTS = "deepspeed", "model.safetensors"
# manifests of version 0 do not state it
FORMAT_VERSION = 1
NEEDED = ("step", "world_size", "stage", "corpus", "config", "files")


class CheckpointError(UserError):
    """A checkpoint that is incomplete or damaged, or that belongs to another run."""


def newest_checkpoint(directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest valid checkpoint of a run directory and its manifest; None if there are no checkpoints.

    A checkpoint that is damaged or belongs to another run is ignored, with a warning that gives the reason.

    Raises CheckpointError if checkpoints exist but none is valid: starting from scratch would overwrite them, although
    they may be repairable.
    """
    reasons = []
    paths = RunDirectory(directory).checkpoint_folders()
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
    """Return the advice for a run whose checkpoints are lost."""
    return f"{command('train.py', 'train')} run={directory} resume=retrain trains it again"


def lost(directory: Path, step: int) -> str | None:
    """Return what is missing of the checkpoint of a step, or None; checks only that its files exist."""
    path = RunDirectory(directory).checkpoint(step)
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return f"{path / MANIFEST if path.exists() else path} is missing"
    except (OSError, ValueError, TypeError, LookupError) as error:
        return f"{path / MANIFEST} cannot be read ({error})"
    missing = [name for name in files if not (path / name).is_file()]
    return f"{path / missing[0]} is missing" if missing else None


def has_checkpoint(directory: Path, step: int) -> bool:
    """Return whether the newest valid checkpoint of a run directory is of this step or a later one."""
    try:
        checkpoint = newest_checkpoint(directory)
    except CheckpointError:
        return False
    return checkpoint is not None and checkpoint[1]["step"] >= step


def checkpoint_of(source: Path, key: str) -> tuple[Path, dict[str, Any]]:
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


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint after verifying the hash of every file. Raises CheckpointError."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files, missing = manifest["files"], [name for name in NEEDED if name not in manifest]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: no readable {MANIFEST} ({error})") from None
    version = manifest.get("format_version", 0)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: its {MANIFEST} has format version {version}, and this depthlm reads versions up to "
            f"{FORMAT_VERSION}; use the depthlm that wrote it, or a newer one"
        )
    if missing:
        raise CheckpointError(f"{path}: {MANIFEST} lacks {', '.join(missing)}")
    if isinstance(manifest["config"], dict):
        use_new_names(manifest["config"])
    existing = {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()} - {MANIFEST}
    if absent := sorted(files.keys() - existing):
        raise CheckpointError(f"{path}: {absent[0]} is missing")
    # DeepSpeed finds files by name and unpickles them, so an unlisted file could execute code
    if foreign := sorted(existing - files.keys()):
        raise CheckpointError(f"{path}: {foreign[0]} is not listed in its {MANIFEST}, so it cannot be trusted")
    for name, actual_digest in _digests(path, files):
        if actual_digest != files[name]:
            raise CheckpointError(f"{path}: {name} is not what was saved (its SHA-256 differs)")
    return manifest


def prune(directory: Path, newest: Path, *, keep_last: int, keep_every: int | None, checkpoint_every: int) -> None:
    """Delete the checkpoints of a run that are no longer retained, after `newest` was written.

    Retained are the newest `keep_last`, the multiples of `keep_every`, and the newest multiple of `checkpoint_every`,
    which is the target of a rewind.
    """
    run = RunDirectory(directory)
    steps = {path: int(path.name.removeprefix("step-")) for path in reversed(run.checkpoint_folders())}
    # a checkpoint beyond the newest was rejected as damaged, and must not count towards keep_last
    valid = [path for path in steps if path <= newest]
    regular = [path for path in valid if steps[path] % checkpoint_every == 0]
    kept = {
        *valid[-keep_last:],
        *regular[-1:],
        *(path for path in valid if keep_every and not steps[path] % keep_every),
    }
    for path in [*(steps.keys() - kept), *run.leftovers()]:
        shutil.rmtree(path, ignore_errors=True)


def _digests(path: Path, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    with ThreadPoolExecutor(4) as pool:
        yield from zip(names, pool.map(lambda name: digest(path / name), names), strict=True)


def _check_own(path: Path, manifest: dict[str, Any], config: dict[str, Any]) -> None:
    differences = compare(manifest["config"], config)
    foreign = sorted(name for name in differences if on_resume(name) == "fixed" and name not in LENGTHS)
    if foreign:
        raise CheckpointError(f"{path}: it belongs to another run ({foreign[0]} differs)")
