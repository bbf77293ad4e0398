"""A stranger can see the product: short files, and folders of no more than a dozen."""

import subprocess
from collections import Counter
from pathlib import Path

from depthlm.locations import REPOSITORY

# lines of a file, and files of a folder besides its __init__.py
LINES, FILES = 380, 12
# one file per mechanism
UNBOUNDED = "depthlm/mechanisms"


def product() -> list[Path]:
    command = ["git", "ls-files", "*.py", ":!tests"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.splitlines()]


def test_no_file_is_long():
    assert [name for name in product() if len((REPOSITORY / name).read_text().splitlines()) > LINES] == []


def test_no_folder_has_many_files():
    counts = Counter(str(name.parent) for name in product() if name.name != "__init__.py")
    assert [folder for folder, count in counts.items() if count > FILES and folder != UNBOUNDED] == []
