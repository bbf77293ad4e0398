"""The manifest of a checkpoint: its content, its own digest, and its validation."""

import hashlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from depthlm.errors import UserError
from depthlm.files import read_text
from depthlm.run_directory import MANIFEST, step_of

# version 0 does not state it; manifests of versions 0 and 1 have no digest of their own
FORMAT_VERSION = 2
SEAL = "sha256"


class CheckpointError(UserError):
    """A checkpoint that is incomplete or damaged, or that belongs to another run."""


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with the format version and the SHA-256 of everything else in it."""
    manifest = {"format_version": FORMAT_VERSION, **manifest}
    return {**manifest, SEAL: _seal(manifest)}


def parse_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, without looking at the files that it lists.

    Raises CheckpointError if it cannot be read, was changed, has a value of a wrong type, or is of another step.
    """
    try:
        manifest = json.loads(read_text(path / MANIFEST))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: no readable {MANIFEST} ({error})") from None
    if not isinstance(manifest, dict) or not manifest:
        raise CheckpointError(f"{path}: no readable {MANIFEST} (it has no keys)")
    version = manifest.get("format_version", 0)
    if not _is_count(version) or version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: its {MANIFEST} has format version {version}, and this depthlm reads versions up to "
            f"{FORMAT_VERSION}; use the depthlm that wrote it, or a newer one"
        )
    if (version >= 2 or SEAL in manifest) and manifest.get(SEAL) != _seal(manifest):
        raise CheckpointError(f"{path}: {MANIFEST} is not what was saved (its SHA-256 differs)")
    if missing := [name for name in NEEDED if name not in manifest]:
        raise CheckpointError(f"{path}: {MANIFEST} lacks {', '.join(missing)}")
    for name, (check, wanted) in (NEEDED | PROGRESS).items():
        if name in manifest and not check(manifest[name]):
            raise CheckpointError(f"{path}: {name} in {MANIFEST} must be {wanted}")
    if step_of(path) not in (None, manifest["step"]):
        raise CheckpointError(f"{path}: {MANIFEST} is of step {manifest['step']}")
    return manifest


def _seal(manifest: dict[str, Any]) -> str:
    content = {name: value for name, value in manifest.items() if name != SEAL}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_files(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) for digest in value.values()
    )


Checks = dict[str, tuple[Callable[[Any], bool], str]]
_STEPS = (_list_of(_is_count), "a list of steps")
NEEDED: Checks = {
    "step": (_is_count, "a whole number from 0"),
    "world_size": (lambda value: _is_count(value) and value > 0, "a whole number above 0"),
    "stage": (lambda value: _is_count(value) and value <= 3, "0, 1, 2 or 3"),
    "corpus": (lambda value: isinstance(value, str), "a text"),
    "config": (lambda value: isinstance(value, dict), "an object"),
    "files": (_is_files, "an object of file names and their SHA-256"),
}
# the fields of depthlm.training.progress.Progress
PROGRESS: Checks = {
    "tokens": (_is_count, "a whole number from 0"),
    "skipped": _STEPS,
    "overflows": _STEPS,
    "rewound": (
        _list_of(lambda pair: isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair))),
        "a list of pairs of steps",
    ),
    "recent_losses": (_list_of(_is_number), "a list of numbers"),
    "wall_seconds": (lambda value: _is_number(value) and value >= 0, "a number from 0"),
    "row": (lambda value: isinstance(value, dict) and (not value or _is_count(value.get("step"))), "a row with a step"),
    "wandb_id": (lambda value: value is None or isinstance(value, str), "a text or null"),
}
