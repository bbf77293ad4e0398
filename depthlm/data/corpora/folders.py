"""The text files in a folder, and what else it has, which is not read."""

import fnmatch
import functools
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from depthlm.data.corpora.formats import TextFile, is_records, split_codec
from depthlm.data.errors import DataError

_NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__"}
# In the top folder of a data set of the hub, these describe it.
_ABOUT = re.compile(r"(readme|licen[cs]e|copying|notice|citation|contributing)(\.[^/]*)?", re.IGNORECASE)
_METADATA = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}
# What only a data set of the hub has in its top folder.
_SIGNS = ("dataset_infos.json", "dataset_dict.json", ".cache/huggingface")
# Names that are shown of many.
_SHOWN = 3


@dataclass
class Folder:
    """The files to read, sorted, and the names of what is not read by the reason; hidden files are neither."""

    files: list[TextFile]
    unread: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, why: str, name: str) -> None:
        """Record that something is not read."""
        self.unread.setdefault(why, []).append(name)

    def notes(self) -> list[str]:
        """Return what is not read, one line per reason."""
        return [f"{why}: {len(names):,} ({_some(names)})" for why, names in sorted(self.unread.items())]


def walk(root: Path, suffixes: tuple[str, ...]) -> Folder:
    """Return the files below a folder with one of the suffixes, in any case.

    Raises DataError where there is no such folder or file.
    """
    if not root.is_dir():
        raise DataError("no such folder or file", root, "Set data.source to the folder or file of your text.")
    result = Folder([])
    unreadable: list[str] = []
    names = _names(root, unreadable)
    for name in unreadable:
        result.skip("folders that cannot be listed", name)
    suffixes = tuple(suffix.lower() for suffix in suffixes)
    regular = [name for name in names if (root / name).is_file()]
    about = _about(root, regular, suffixes)
    for name in sorted({*names} - {*regular}):
        dangling = (root / name).is_symlink() and not (root / name).exists()
        result.skip("dangling links" if dangling else "entries that are not regular files", name)
    for name in sorted(regular):
        if name in about:
            result.skip("files about the data set", name)
        elif name.lower().endswith(suffixes):
            result.files.append(TextFile(name, str(root / name)))
        else:
            suffix = Path(split_codec(name)[0]).suffix + (split_codec(name)[1] or "")
            result.skip(f"files ending in {suffix}" if suffix else "files without a suffix", name)
    if not result.files:
        notes = "; ".join(result.notes())
        what = f"no file ending in {', '.join(suffixes)}{f', only {notes}' if notes else ''}"
        raise DataError(what, root, "Set data.suffixes to those of your text.")
    return result


def matches(name: str, pattern: str) -> bool:
    """Return whether a file's name below the root matches a pattern: `*` is any text, `**/` any folders or none."""
    return _compiled(pattern).match(name) is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    # a private character, which fnmatch leaves as it is
    translated = fnmatch.translate(re.sub(r"(^|(?<=/))\*\*/", "\ue000", pattern))
    return re.compile(translated.replace("\ue000", "(?:.*/)?"))


def _names(root: Path, unreadable: list[str]) -> list[str]:
    """Return the names below the root of all files that are not hidden. A link to a folder is followed, but only once.

    unreadable: gets the names of folders that cannot be listed.
    """

    def failed(error: OSError) -> None:
        unreadable.append(os.path.relpath(error.filename, root))

    names = []
    # a mirror may consist of links
    known = {os.path.realpath(root)}
    for folder, subfolders, files in os.walk(root, followlinks=True, onerror=failed):
        subfolders[:] = [name for name in sorted(subfolders) if name not in _NOT_SOURCES and not name.startswith(".")]
        places = {name: os.path.realpath(os.path.join(folder, name)) for name in subfolders}
        subfolders[:] = [name for name in subfolders if places[name] not in known]
        known |= set(places.values())
        names += [Path(folder, name).relative_to(root).as_posix() for name in files if not name.startswith(".")]
    return names


def _about(root: Path, names: list[str], suffixes: tuple[str, ...]) -> set[str]:
    """Return the files that describe a data set of the hub, such as its card and licence; none in another folder."""
    about = {name for name in names if _ABOUT.fullmatch(name) or name in _METADATA}
    others = [name for name in names if name not in about and (is_records(name) or name.lower().endswith(suffixes))]
    if _is_data_set(root):
        # its script, which is not run
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


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
