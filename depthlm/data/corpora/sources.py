"""The sources that a configuration trains and validates on, and the files of each, in a folder or on the hub."""

import fnmatch
import hashlib
import os
import platform
import re
import sysconfig
from collections import defaultdict
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from depthlm.data.corpora.formats import TextFile, is_records, split_codec
from depthlm.data.settings import Data, Source
from depthlm.errors import DataError

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
# What Spark, Hadoop, archives and file systems leave beside data: unfinished output, markers, metadata.
_OF_TOOLS = {"_temporary", "_SUCCESS", "_metadata", "_common_metadata", "_delta_log", "_spark_metadata"}
_OF_TOOLS |= {"__MACOSX", "lost+found", "Thumbs.db", "desktop.ini"}
_MARKERS = re.compile(r"_(committed|started)_\d+")
# Files in the top folder of a data set of the hub that describe it.
_ABOUT = re.compile(r"(readme|licen[cs]e|copying|notice|citation|contributing)(\.[^/]*)?", re.IGNORECASE)
_METADATA = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}
# Entries that only a data set of the hub has in its top folder.
_SIGNS = ("dataset_infos.json", "dataset_dict.json", ".cache/huggingface")
# Names that a message shows of a longer list.
_SHOWN = 3


@dataclass(frozen=True)
class TextFiles:
    """The files of one source. held_out: null where documents are held out by a hash of their text.

    description: what the text was made from, for the manifest. state: a digest of the files' modification times, empty
    on the hub; an unfinished preparation with another one starts from scratch.
    times: a digest that also covers when the system last changed each file (ctime), which no program can set; empty on
    the hub. unread: the other content of the folder, a line for each reason why it is not read.
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
    """Return the additional validation sets by name; a missing text field or missing suffixes come from `data`."""
    return {
        name: replace(
            source,
            split=source.split or "validation",
            suffixes=source.suffixes or data.suffixes,
            text_field=source.text_field or data.text_field,
        )
        for name, source in data.validation.items()
    }


def all_sources(data: Data) -> dict[str, Source]:
    """Return the sources to train on, then the additional validation sets, by name."""
    return train_sources(data) | validation_sources(data)


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
    remedy = "Set data.source to a folder or file of text, or data.path to a folder with a manifest.json."
    what = "no token files, and no text to prepare" if source.path else "no text to prepare"
    raise DataError(what, source.path or f"corpus {name!r}", remedy)


def walk(root: Path, suffixes: tuple[str, ...]) -> tuple[list[TextFile], dict[str, list[str]]]:
    """Return the files below a folder with one of the suffixes, in any case, and the other entries by the reason.

    Both are sorted. A file with several links is read once. Raises DataError where there is no such folder or file.
    """
    if not root.is_dir():
        raise DataError("no such folder or file", root, "Set data.source to the folder or file of your text.")
    files: list[TextFile] = []
    unread: dict[str, list[str]] = defaultdict(list)
    names = _names(root, unread)
    suffixes = tuple(suffix.lower() for suffix in suffixes)
    regular = {name for name in names if (root / name).is_file()}
    about = _about(root, sorted(regular), suffixes)
    for name in names:
        plain, codec = split_codec(name)
        if name not in regular:
            dangling = (root / name).is_symlink() and not (root / name).exists()
            unread["dangling links" if dangling else "entries that are not regular files"].append(name)
        elif name in about:
            unread["files about the data set"].append(name)
        elif name.lower().endswith(suffixes):
            files.append(TextFile(name, str(root / name)))
        else:
            suffix = Path(plain).suffix + (codec or "")
            unread[f"files ending in {suffix}" if suffix else "files without a suffix"].append(name)
    if not files:
        notes = "; ".join(_notes(unread))
        what = f"no file ending in {', '.join(suffixes)}{f', only {notes}' if notes else ''}"
        raise DataError(what, root, "Set data.suffixes to those of your text.")
    return files, unread


def _with_defaults(source: Source, data: Data, path: str | None) -> Source:
    shared = {entry.name for entry in fields(source)} - {"weight", "path"}
    missing = {name: getattr(data, name) for name in shared if getattr(source, name) is None}
    return replace(source, path=path, **missing)


def _hub_files(source: Source, revision: str | None) -> TextFiles:
    from depthlm.data.corpora.hub import hub_files

    assert source.hub is not None
    splits = [split for split in (source.split or "train", source.validation_split) if split]
    commit, files = hub_files(source.hub, source.subset, revision or source.revision, splits)
    train, *held_out = (files[split] for split in splits)
    description = {"hub": source.hub, "subset": source.subset, "revision": commit, "files": len(train)}
    return TextFiles(train, held_out[0] if held_out else None, description)


def _local_files(name: str, source: Source) -> TextFiles:
    root = root_of(name, source)
    description: dict[str, Any] = {"root": str(root.resolve())}
    unread: tuple[str, ...] = ()
    if root.is_file():
        train, held_out = [TextFile(root.name, str(root))], None
    else:
        files, others = walk(root, tuple(source.suffixes or ()) if source.source else (".py",))
        train, held_out = _split_matching(files, source, root)
        unmatched = sorted({*files} - {*train, *(held_out or ())})
        others["files that data.files does not match"] = [file.name for file in unmatched]
        # the default corpus is Python's standard library, of which no user chose the files
        unread = tuple(_notes(others)) if source.source else ()
    stats = [(file.name, os.stat(file.location)) for file in (*train, *(held_out or ()))]
    description |= {"files": len(stats), "bytes": sum(stat.st_size for _, stat in stats)}
    description["listing"] = _digest([(name, stat.st_size) for name, stat in stats])
    if not source.source:
        description["python"] = platform.python_version()
    state = _digest([(name, stat.st_mtime_ns) for name, stat in stats])
    times = _digest([(name, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats])
    return TextFiles(train, held_out, description, state, times, unread)


def _digest(listing: list[tuple[str | int, ...]]) -> str:
    return hashlib.sha256(repr(listing).encode()).hexdigest()


def _split_matching(files: list[TextFile], source: Source, root: Path) -> tuple[list[TextFile], list[TextFile] | None]:
    """Return the training files and the held-out files (None without a pattern). Raises DataError without a match."""
    patterns = {"data.files": source.files, "data.validation_files": source.validation_files}
    set_patterns = {key: pattern for key, pattern in patterns.items() if pattern is not None}
    compiled = {key: _compile_pattern(pattern) for key, pattern in set_patterns.items()}
    matching = {key: [file for file in files if regex.match(file.name)] for key, regex in compiled.items()}
    if missing := [key for key in set_patterns if not matching[key]]:
        what = " and ".join(f"{key}={set_patterns[key]}" for key in missing)
        names = ", ".join(file.name for file in files[:3])
        remedy = f"Set {' and '.join(missing)} to patterns of their names below the folder ({names}, ...), or to null."
        raise DataError(f"no file matches {what}", root, remedy)
    held_out = matching.get("data.validation_files")
    excluded = set(held_out or ())
    return [file for file in matching.get("data.files", files) if file not in excluded], held_out


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the expression of a pattern of names: `*` is any text, `**/` any folders or none."""
    # fnmatch leaves a private character unchanged
    translated = fnmatch.translate(re.sub(r"(^|(?<=/))\*\*/", "\ue000", pattern))
    return re.compile(translated.replace("\ue000", "(?:.*/)?"))


def _names(root: Path, unread: dict[str, list[str]]) -> list[str]:
    """Return the names below the root of all files that may be text, each under one name.

    A folder or file that links lead to as well has the name of its own place, if that is below the root. unread:
    receives the other entries by the reason.
    """
    names: dict[str, str] = {}
    visited: set[str] = set()
    # links are followed last, so that what is below the root has its own name; a mirror may consist of links
    folders, links = [(os.path.realpath(root), "")], list[tuple[str, str]]()
    linked_files: list[tuple[str, str]] = []
    while folders or links:
        is_link = not folders
        path, inside = links.pop(0) if is_link else folders.pop()
        if path in visited:
            unread["links to what is read already"].append(inside)
            continue
        visited.add(path)
        try:
            with os.scandir(path) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError:
            unread["folders that cannot be listed"].append(inside or ".")
            continue
        for entry in entries:
            name = f"{inside}/{entry.name}" if inside else entry.name
            if reason := _why_unread(entry):
                unread[reason].append(name)
            elif os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir():
                real = os.path.realpath(entry.path)
                (links if entry.is_symlink() else folders).append((real, name))
            elif entry.is_symlink():
                linked_files.append((os.path.realpath(entry.path), name))
            elif names.setdefault(entry.path, name) != name:
                unread["links to what is read already"].append(name)
    for path, name in sorted(linked_files, key=lambda file: file[1]):
        if names.setdefault(path, name) != name:
            unread["links to what is read already"].append(name)
    return sorted(names.values())


def _why_unread(entry: os.DirEntry[str]) -> str | None:
    """Return why an entry is no data whatever it contains, or None."""
    if entry.name.startswith("."):
        return "hidden files and folders"
    if entry.name in _OF_TOOLS or _MARKERS.fullmatch(entry.name):
        return "files and folders of other tools"
    return "folders of packages" if entry.name in _SKIPPED_FOLDERS and entry.is_dir() else None


def _about(root: Path, names: list[str], suffixes: tuple[str, ...]) -> set[str]:
    """Return the files that describe a data set of the hub, such as its card and licence; none in another folder."""
    about = {name for name in names if _ABOUT.fullmatch(name) or name in _METADATA}
    others = [name for name in names if name not in about and (is_records(name) or name.lower().endswith(suffixes))]
    if _is_data_set(root):
        # nor its loading script, which is never run
        return about | {name for name in others if "/" not in name and name.endswith(".py")}
    return about if others and all(map(is_records, others)) else set()


def _is_data_set(root: Path) -> bool:
    if any((root / sign).exists() for sign in _SIGNS):
        return True
    try:
        with open(root / "README.md", "rb") as card:
            return card.readline(100).rstrip() == b"---"
    except OSError:
        return False


def _notes(unread: dict[str, list[str]]) -> list[str]:
    """Return a line for each reason why entries are not read, with their number and the names of some."""
    return [
        f"{why}: {len(names):,} ({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''})"
        for why, names in sorted(unread.items())
        if names
    ]
