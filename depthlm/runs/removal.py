"""Removing runs, or only their checkpoints, so that an interruption never leaves half of a run."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from depthlm.files import open_appending
from depthlm.run_directory import REMOVING, RunDirectory, hidden_path
from depthlm.runs.listing import RunListing, run_folders
from depthlm.runs.records import is_locked

LEFTOVER = "leftover"
LEFTOVER_NAME = re.escape(REMOVING) + r".+-[0-9a-f]{16}"
LOCKED = "a process trains in it"


@dataclass(frozen=True)
class Removal:
    """A folder that would be removed. run: the run directory that it is, or is a part of. state: of that run.

    size: the bytes that it occupies on the disk. kept: why it is not removed, or None.
    """

    path: Path
    run: Path
    state: str
    size: int
    kept: str | None = None


def plan_removal(root: Path, runs: Sequence[RunListing], only_checkpoints: bool) -> list[Removal]:
    """Return what removing these runs below a folder would remove, and what interrupted removals have left there.

    only_checkpoints: keep the runs, and remove their checkpoints.
    """
    planned = []
    every = run_folders(root)
    for run in runs:
        folder = Path(run.directory)
        path = RunDirectory(folder).checkpoints if only_checkpoints else folder
        if only_checkpoints and not path.exists():
            continue
        kept = _why_kept(root, run, path, [] if only_checkpoints else every)
        planned.append(Removal(path, folder, run.state, size_on_disk(path), kept))
    # unlike rglob, it skips folders that a training process removes meanwhile
    leftovers = [Path(folder) for folder, _, _ in os.walk(root) if re.fullmatch(LEFTOVER_NAME, Path(folder).name)]
    for path in sorted(leftovers):
        # what is inside another folder is removed, and counted, with that one
        if not any(path.is_relative_to(other.path) for other in planned if other.kept is None):
            planned.append(Removal(path, path.parent, LEFTOVER, size_on_disk(path)))
    return planned


def _why_kept(root: Path, run: RunListing, path: Path, every: Sequence[Path]) -> str | None:
    folder = Path(run.directory)
    if "?" in (run.model, run.size):
        return "its config.yaml is not that of a run"
    if is_locked(RunDirectory(folder).lock):
        return LOCKED
    if path.is_symlink():
        return "it is a symbolic link"
    if folder.resolve() == root.resolve():
        return "it is the folder given by --root; give the folder above it"
    if not path.resolve().is_relative_to(root.resolve()):
        return "it is outside of --root"
    inside = [other for other in every if other != folder and other.is_relative_to(folder)]
    return f"it contains another run, {inside[0]}" if inside else None


def remove(removal: Removal) -> str | None:
    """Remove a planned folder. Returns why it was kept, if it was, such as for a process that trains in it by now.

    It is renamed before its content is deleted, so that an interruption leaves nothing that looks like a run.
    Raises OSError if the folder, or a part of it, cannot be removed.
    """
    if removal.kept is not None:
        return removal.kept
    hidden = removal.path
    if removal.state != LEFTOVER:
        with _lock(RunDirectory(removal.run).lock) as is_free:
            if not is_free:
                return LOCKED
            hidden = hidden_path(removal.path)
            removal.path.rename(hidden)
    # another process may be removing the same leftover
    with suppress(FileNotFoundError):
        shutil.rmtree(hidden)
    return None


@contextmanager
def _lock(file: Path) -> Iterator[bool]:
    """Hold the lock of a run directory, or yield False if another process holds it. Raises OSError."""
    with open_appending(file) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def size_on_disk(folder: Path) -> int:
    """Return the bytes that a folder occupies on the disk: a file with several names counts once, a link as itself."""
    blocks: dict[tuple[int, int], int] = {}
    pending = [folder]
    for parent in pending:
        try:
            pending += [Path(entry.path) for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False)]
            entries = [parent.lstat(), *(entry.stat(follow_symlinks=False) for entry in os.scandir(parent))]
        except OSError:
            # a file that another process has just removed, or a folder that cannot be read
            continue
        blocks |= {(entry.st_dev, entry.st_ino): entry.st_blocks for entry in entries}
    return 512 * sum(blocks.values())
