"""The sources that a configuration trains and validates on, and the files of each."""

import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from depthlm.data.corpora.folders import matches, walk
from depthlm.data.corpora.formats import TextFile
from depthlm.data.errors import DataError
from depthlm.data.settings import Data, Source


@dataclass(frozen=True)
class TextFiles:
    """The files of one source. held_out: null where documents are held out by a hash of their names.

    description: what the text was made from, for the manifest. state: a digest of the files' modification times.
    times: a digest that also covers when the files were last written, renamed or copied, which edits cannot hide; empty
    on the hub. unread: what else the folder has, a line for each reason why it is not read.
    """

    train: list[TextFile]
    held_out: list[TextFile] | None = None
    description: dict[str, Any] = field(default_factory=dict)
    state: str = ""
    times: str = ""
    unread: tuple[str, ...] = ()


def train_sources(data: Data) -> dict[str, Source]:
    """Return the sources to train on, by name: those of a mixture, with missing settings from `data`, else one source.

    data.path, where given, is a mixture's parent folder, with one folder per source.
    """
    if not data.sources:
        return {data.name: data}
    return {
        name: _with_defaults(source, data, path=source.path or (str(Path(data.path, name)) if data.path else None))
        for name, source in data.sources.items()
    }


def validation_sources(data: Data) -> dict[str, Source]:
    """Return the further validation sets by name; a missing text field or missing suffixes come from `data`."""
    return {
        name: replace(
            source,
            split=source.split or "validation",
            suffixes=source.suffixes or data.suffixes,
            text_field=source.text_field or data.text_field,
        )
        for name, source in data.validation.items()
    }


def is_remote(source: Source) -> bool:
    """Return whether the text comes from the hub."""
    return source.source is None and source.hub is not None


def text_files(name: str, source: Source, revision: str | None = None) -> TextFiles:
    """Return the files of a source. revision: the hub's commit, where known; null: resolve source.revision.

    Raises DataError where there is no text, no file matches, or the hub cannot be reached.
    """
    if is_remote(source):
        return _hub_files(source, revision)
    return _local_files(name, source)


def root_of(name: str, source: Source) -> Path:
    """Return the local folder or file of the raw text. Raises DataError for a source without local text."""
    if source.source:
        return Path(source.source)
    if name == "stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    if source.path:
        raise DataError(
            "no token files", source.path, "Set data.path to a folder with a manifest.json, or set data.source."
        )
    raise DataError(
        "no text to prepare",
        f"corpus {name!r}",
        "Set data.source to a folder or file of text, or data.path to a folder of token files.",
    )


def _with_defaults(source: Source, data: Data, path: str | None) -> Source:
    shared = {entry.name for entry in fields(source)} - {"weight", "path"}
    missing = {name: getattr(data, name) for name in shared if getattr(source, name) is None}
    return replace(source, path=path, **missing)


def _hub_files(source: Source, revision: str | None) -> TextFiles:
    from depthlm.data.corpora.hub import hub_files

    assert source.hub is not None
    splits = [split for split in (source.split or "train", source.validation_split) if split]
    commit, files = hub_files(source.hub, source.subset, revision or source.revision, splits)
    train, *held_out = ([TextFile(*file) for file in files[split]] for split in splits)
    description = {"hub": source.hub, "subset": source.subset, "revision": commit, "files": len(train)}
    return TextFiles(train, held_out[0] if held_out else None, description)


def _local_files(name: str, source: Source) -> TextFiles:
    root = root_of(name, source)
    description: dict[str, Any] = {"root": str(root.resolve())}
    unread: tuple[str, ...] = ()
    if root.is_file():
        train, held_out = [TextFile(root.name, str(root))], None
    else:
        folder = walk(root, tuple(source.suffixes or ()) if source.source else (".py",))
        train, held_out = _matching(folder.files, source, root)
        for file in sorted({*folder.files} - {*train, *(held_out or ())}):
            folder.skip("files that data.files does not match", file.name)
        # of Python's own folder, a user wants to know nothing
        unread = tuple(folder.notes()) if source.source else ()
    files = [(file.name, os.stat(file.location)) for file in (*train, *(held_out or ()))]
    description |= {"files": len(files), "bytes": sum(stat.st_size for _, stat in files)}
    description["listing"] = _digest([(name, stat.st_size) for name, stat in files])
    if not source.source:
        description["python"] = platform.python_version()
    state = _digest([(name, stat.st_mtime_ns) for name, stat in files])
    times = _digest([(name, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in files])
    return TextFiles(train, held_out, description, state, times, unread)


def _digest(listing: list[tuple[str | int, ...]]) -> str:
    return hashlib.sha256(repr(listing).encode()).hexdigest()


def _matching(files: list[TextFile], source: Source, root: Path) -> tuple[list[TextFile], list[TextFile] | None]:
    """Return the training files and the held-out files (None without a pattern). Raises DataError without a match."""
    patterns = {"data.files": source.files, "data.validation_files": source.validation_files}
    given = {key: pattern for key, pattern in patterns.items() if pattern is not None}
    matching = {key: [file for file in files if matches(file.name, pattern)] for key, pattern in given.items()}
    if missing := [key for key in given if not matching[key]]:
        what = " and ".join(f"{key}={given[key]}" for key in missing)
        names = ", ".join(file.name for file in files[:3])
        remedy = f"Set {' and '.join(missing)} to patterns of their names below the folder ({names}, ...), or to null."
        raise DataError(f"no file matches {what}", root, remedy)
    held_out = matching.get("data.validation_files")
    excluded = set(held_out or ())
    return [file for file in matching.get("data.files", files) if file not in excluded], held_out
