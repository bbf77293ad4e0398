"""The files that a preparation leaves."""

from pathlib import Path


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def left_over(folder: Path) -> set[str]:
    """Return what is next to a folder of token files, except lock files."""
    return {path.name for path in folder.parent.iterdir() if path.suffix != ".lock"} - {folder.name}
