"""Files that survive a power cut."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(file: Path, text: str) -> None:
    """Put the text in place of the file's, by one rename: a kill leaves the old text or the new one."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    os.replace(temporary, file)
