"""A snapshot of the code when a sweep is submitted, so that later changes do not reach waiting jobs."""

import fcntl
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from depthlm.errors import UserError
from depthlm.locations import CONF, IS_CHECKOUT, PACKAGE, REPOSITORY
from depthlm.machine.environment import git_state


def next_snapshot(folder: Path) -> Path:
    """Return the folder of the next submission: 0001, 0002, ..."""
    numbers = [int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()]
    return folder.absolute() / f"{max(numbers, default=0) + 1:04d}"


def take_snapshot(snapshot: Path, lines: list[str]) -> None:
    """Copy the code, and write the file of points beside it.

    From a git checkout, copy tracked files and new files that git does not ignore; otherwise, copy the installed
    package. Raises UserError if the folder exists or the files cannot be written.
    """
    try:
        snapshot.mkdir(parents=True)
        for name in _files():
            target = snapshot / "code" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target)
        (snapshot / "code" / "git.json").write_text(json.dumps(git_state()) + "\n")
        # an argument may contain a path that is not UTF-8
        (snapshot / "points").write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"{snapshot}: the code cannot be copied there ({error})") from None


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Wait until no other process submits a sweep from this folder. Raises UserError if it cannot be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise UserError(f"{folder}: cannot be created ({error})") from None
    with lock:
        # a file system without locks; `take_snapshot` still refuses a folder of another process
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _files() -> Iterator[Path]:
    """Yield every file of the code, relative to the checkout or to the folder of installed packages."""
    listed = _git_files() if IS_CHECKOUT else None
    if listed is None:
        folders = [PACKAGE, CONF, REPOSITORY / "hydra_plugins/points_sweeper.py"]
        files = [file for folder in folders for file in (folder, *folder.rglob("*")) if "__pycache__" not in file.parts]
        listed = list(dict.fromkeys(file.relative_to(REPOSITORY) for file in files))
    # git also lists deleted files
    return (file for file in listed if (REPOSITORY / file).is_file())


def _git_files() -> list[Path] | None:
    """Return tracked files and new files that git does not ignore, or None outside a git checkout."""
    if not (REPOSITORY / ".git").exists():
        return None
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return [Path(name) for name in done.stdout.split("\0") if name]
