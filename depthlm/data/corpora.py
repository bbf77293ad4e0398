"""Where raw text comes from: a corpus is a sequence of named documents, always in the same order."""

import math
import os
import platform
import sysconfig
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from depthlm.data.errors import DataError

if TYPE_CHECKING:
    from depthlm.config.schema import Data

# Characters of one document where the source is a single file: smaller in a short file, so that some can be held out.
PIECE = 8192
PIECES = 32

_NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__"}


def documents(data: "Data") -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each document, sorted by name.

    A document is a file of the folder, named by its path below it; a single file is cut at line ends into documents
    of about PIECE characters, or a PIECES-th of its bytes if that is less. The text is exactly that of the file.
    Empty files of a folder and those that are not UTF-8 are left out.

    Raises DataError where the source is missing or holds no file of data.suffixes.
    """
    files = source_files(data)
    if data.source and Path(data.source).is_file():
        yield from _pieces_of_file(files[0])
        return
    root = source_root(data)
    for file in files:
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text:
            yield file.relative_to(root).as_posix(), text


def source_root(data: "Data") -> Path:
    """The folder or file of the raw text. Raises DataError for a corpus whose text is not to be had here."""
    if data.source:
        return Path(data.source)
    if data.name == "stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    raise DataError(
        "no text to prepare",
        f"corpus {data.name!r}",
        "Set data.source to a folder or file of text, or data.path to a folder of token files.",
    )


def source_files(data: "Data") -> list[Path]:
    """The files behind the documents, sorted by their name below the root.

    Hidden files and folders are left out, and so are __pycache__ and installed packages.
    Raises DataError where the source is missing or has no file of these suffixes.
    """
    root = source_root(data)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DataError("no such folder or file", root, "Set data.source to the folder or file of your text.")
    suffixes = tuple(data.suffixes) if data.source else (".py",)
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_SOURCES and not name.startswith(".")]
        found += [Path(folder, name) for name in names if name.endswith(suffixes) and not name.startswith(".")]
    # A dangling link is a name without a file.
    found = [file for file in found if file.is_file()]
    if not found:
        raise DataError(f"no file ending in {', '.join(suffixes)}", root, "Set data.suffixes to those of your text.")
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def describe(data: "Data") -> dict[str, Any]:
    """What the text was made from, for the manifest: the place, its files, their bytes, and the Python of stdlib."""
    files = source_files(data)
    description = {
        "root": str(source_root(data).resolve()),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }
    return description if data.source else description | {"python": platform.python_version()}


def held_out_share(data: "Data") -> float:
    """data.validation_fraction, or what holds out one document where that would hold out none."""
    lowest = 1.0
    for name, _ in documents(data):
        lowest = min(lowest, share(name))
        if lowest < data.validation_fraction:
            return data.validation_fraction
    return math.nextafter(lowest, 1.0)


def is_validation(name: str, fraction: float) -> bool:
    """Whether the document of this name is held out: true for a share `fraction` of all names."""
    return share(name) < fraction


def share(name: str) -> float:
    """A hash of the name, uniform in [0, 1)."""
    # 53 bits are what a float holds: more could round up to 1.
    return (int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) >> 11) / 2**53


def pieces(stream: TextIO, size: int) -> Iterator[str]:
    """Cut a stream at the first line end after each `size` characters; a longer line is cut at `size` more."""
    while piece := stream.read(size):
        yield piece + stream.readline(size)


def _pieces_of_file(file: Path) -> Iterator[tuple[str, str]]:
    try:
        with open(file, encoding="utf-8", newline="") as stream:
            size = max(1, min(PIECE, file.stat().st_size // PIECES))
            for number, piece in enumerate(pieces(stream, size)):
                yield f"{file.name}:{number:08d}", piece
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 ({error.reason})", file, "Convert the file to UTF-8.") from error
