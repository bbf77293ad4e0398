"""The code as it was when a sweep was submitted: jobs that wait do not see what is changed afterwards."""

import json
import shutil
import subprocess
from pathlib import Path

from depthlm.environment import REPOSITORY, git_state
from depthlm.errors import UserError


def next_snapshot(folder: Path) -> Path:
    """The folder of the next submission: 0001, 0002, ..."""
    numbers = [int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()]
    return folder.absolute() / f"{max(numbers, default=0) + 1:04d}"


def take_snapshot(snapshot: Path, lines: list[str]) -> None:
    """Copy the checkout's files, those of git and new ones it does not ignore, and write the points beside them.

    Raises UserError outside a git checkout, or where the files cannot be written.
    """
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=REPOSITORY, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            source, target = REPOSITORY / name, snapshot / "code" / name
            # one that git still lists, but that is deleted
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        (snapshot / "code" / "git.json").write_text(json.dumps(git_state()) + "\n")
        (snapshot / "points").write_text("\n".join(lines) + "\n")
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"{snapshot}: the code cannot be copied there ({error})") from None
