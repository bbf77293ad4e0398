"""What a crash may leave of a folder: the file operations of a program are recorded, and every outcome is built.

The model of a file system is the weakest one that POSIX allows, as in ALICE (Pillai et al., OSDI 2014). After a crash,
a file has the content of its last fsync, or a later one: complete, torn, or replaced by zeros. A folder has the entries
of its last fsync, and any of the later changes: entries created, removed or renamed. A rename happens or not.
"""

import fcntl
import itertools
import logging
import math
import os
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

# outcomes of one moment that are built; if there are more, the extremes and a sample of the others
MOST = 16
ROOT = -1


class Tree(NamedTuple):
    """A folder. entries: of each folder, the inode of each name. contents: of each file."""

    entries: dict[int, dict[str, int]]
    contents: dict[int, bytes]


class Event(NamedTuple):
    """Something that was seen: look, settle (a Tree), fsync (an inode), rename (places), mark (a text)."""

    kind: str
    value: Any


def look(root: Path) -> Tree:
    """Return the folder as the running program sees it."""
    tree = Tree({ROOT: {}}, {})
    waiting = [(ROOT, root)]
    while waiting:
        inode, folder = waiting.pop()
        tree.entries.setdefault(inode, {})
        # another process may remove what is listed
        with suppress(FileNotFoundError):
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):
                    # not entry.inode(), which differs from this one on some file systems
                    number = entry.stat(follow_symlinks=False).st_ino
                    if entry.is_dir():
                        waiting.append((number, Path(entry.path)))
                    else:
                        tree.contents[number] = Path(entry.path).read_bytes()
                    tree.entries[inode][entry.name] = number
    return tree


class Recorder:
    """Appends the events of this process to a file that all processes of a run share."""

    def __init__(self, root: Path, events: Path) -> None:
        self.root, self.events = root, events

    def filter(self, record: logging.LogRecord) -> bool:
        """Note what is logged."""
        with self._noting() as note:
            note(Event("mark", record.getMessage()))
        return True

    def settle(self) -> None:
        """Count everything that is in the folder as synced."""
        with self.events.open("ab") as file:
            pickle.dump(Event("settle", look(self.root)), file)

    @contextmanager
    def recording(self, unsynced: str = "") -> Iterator[None]:
        """Record until the block ends. unsynced: a pattern of files and folders whose fsync is left out."""
        fsync, replace = os.fsync, os.replace

        def recorded_fsync(file: Any) -> None:
            number = file if isinstance(file, int) else file.fileno()
            path = Path(os.readlink(f"/proc/self/fd/{number}"))
            if not (unsynced and path.match(unsynced)):
                fsync(number)
                if path.is_relative_to(self.root):
                    with self._noting() as note:
                        note(Event("fsync", ROOT if path == self.root else os.fstat(number).st_ino))

        def recorded_replace(source: Any, target: Any) -> None:
            paths = [Path(path).absolute() for path in (source, target)]
            if not paths[0].is_relative_to(self.root):
                return replace(source, target)
            with self._noting() as note:
                note()
                places = [(self._inode(path.parent), path.name) for path in paths]
                replace(source, target)
                return note(Event("rename", places))

        def then_noted(remove: Callable[..., None]) -> Callable[..., None]:
            def recorded_removal(*arguments: Any, **settings: Any) -> None:
                # a new file may get the inode of one that was removed
                with self._noting() as note:
                    remove(*arguments, **settings)
                    note()

            return recorded_removal

        log = logging.getLogger("depthlm")
        # a run removes all handlers when it starts
        log.addFilter(self)
        recorded = {"fsync": recorded_fsync, "replace": recorded_replace, "rename": recorded_replace}
        recorded |= {"unlink": then_noted(os.unlink), "rmdir": then_noted(os.rmdir)}
        try:
            with mock.patch.multiple(os, **recorded):
                yield
            with self._noting() as note:
                note()
        finally:
            log.removeFilter(self)

    @contextmanager
    def _noting(self) -> Iterator[Callable[..., None]]:
        """Yield what appends the state of the folder and events. Meanwhile, nobody else removes or renames."""
        with self.events.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)

            def note(*events: Event) -> None:
                for event in (Event("look", look(self.root)), *events):
                    pickle.dump(event, file)

            yield note

    def _inode(self, folder: Path) -> int:
        return ROOT if folder.resolve() == self.root.resolve() else os.stat(folder).st_ino


Change = tuple[tuple[int, str, int | None], ...]


def _apply(change: Change, entries: dict[int, dict[str, int]]) -> None:
    for folder, name, inode in change:
        names = entries.setdefault(folder, {})
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


@dataclass
class Disk:
    """A simulated disk. entries, contents: what no crash can lose. pending: later changes of entries, in their order.

    now: the folder as the running program sees it. marks: what was logged so far. numbers: a number of its own for each
    file and folder, since inodes are used again.
    """

    entries: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    contents: dict[int, bytes] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)
    now: Tree = field(default_factory=lambda: Tree({ROOT: {}}, {}))
    marks: list[str] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=lambda: {ROOT: ROOT})
    count: int = 0

    def apply(self, event: Event) -> None:
        """Let an event happen."""
        if event.kind == "mark":
            self.marks.append(event.value)
        elif event.kind == "settle":
            self.now = self._numbered(event.value)
            self.entries = {inode: dict(names) for inode, names in self.now.entries.items()}
            self.contents, self.pending = dict(self.now.contents), []
        elif event.kind == "fsync":
            # another rank may have removed it in the meantime
            if event.value in self.numbers:
                self._sync(self.numbers[event.value])
        elif event.kind == "look":
            tree = self._numbered(event.value)
            self.pending += [(change,) for change in self._changes(tree)]
            self.now = tree
        else:
            self._join([(self.numbers[inode], name) for inode, name in event.value])

    def outcomes(self, chance: random.Random) -> Iterator[Tree]:
        """Yield what a crash at this moment may leave: all outcomes, or at most MOST of them."""
        files = [inode for inode, content in self.now.contents.items() if self.contents.get(inode) != content]
        choices: list[list[Any]] = [[True, False] for _ in self.pending]
        choices += [_versions(self.contents.get(inode, b""), self.now.contents[inode]) for inode in files]
        if math.prod(map(len, choices)) <= MOST:
            chosen = list(itertools.product(*choices))
        else:
            # all changes up to each moment, with the old content of the files, and with the new content
            number = len(self.pending)
            cut = [
                (*(i < end for i in range(number)), *(options[which % len(options)] for options in choices[number:]))
                for end in reversed(range(number + 1))
                for which in (0, 1)
            ]
            drawn = [tuple(chance.choice(options) for options in choices) for _ in range(MOST)]
            chosen = [*cut[: MOST // 2], *drawn][:MOST]
        for picked in chosen:
            happened, written = picked[: len(self.pending)], picked[len(self.pending) :]
            yield self._outcome(happened, dict(zip(files, written, strict=True)))

    def _outcome(self, happened: tuple[bool, ...], written: dict[int, bytes]) -> Tree:
        entries = {inode: dict(names) for inode, names in self.entries.items()}
        for change in itertools.compress(self.pending, happened):
            _apply(change, entries)
        return Tree(entries, {**self.contents, **self.now.contents, **written})

    def _changes(self, tree: Tree) -> list[tuple[int, str, int | None]]:
        found: list[tuple[int, str, int | None]] = []
        for inode in self.now.entries.keys() | tree.entries.keys():
            before, after = self.now.entries.get(inode, {}), tree.entries.get(inode, {})
            found += [
                (inode, n, after.get(n)) for n in sorted(before.keys() | after.keys()) if before.get(n) != after.get(n)
            ]
        return found

    def _sync(self, inode: int) -> None:
        if inode in self.now.contents:
            self.contents[inode] = self.now.contents[inode]
            return
        kept = []
        for change in self.pending:
            if all(place != inode for place, _, _ in change):
                kept.append(change)
                continue
            _apply(change, self.entries)
        self.pending = kept

    def _join(self, places: list[tuple[int, str]]) -> None:
        """Make the newest changes of these places one change."""
        joined = [change for change in self.pending if len(change) == 1 and change[0][:2] in places][-len(places) :]
        self.pending = [change for change in self.pending if not any(change is one for one in joined)]
        self.pending.append(tuple(change[0] for change in joined))

    def _numbered(self, tree: Tree) -> Tree:
        """Return the tree with our numbers instead of inodes."""
        numbers = {ROOT: ROOT}
        for inode in (*tree.entries, *tree.contents):
            if inode not in numbers:
                self.count += 1
                numbers[inode] = self.numbers.get(inode, self.count)
        self.numbers = numbers
        entries = {
            numbers[folder]: {name: numbers[inode] for name, inode in names.items()}
            for folder, names in tree.entries.items()
        }
        return Tree(entries, {numbers[inode]: content for inode, content in tree.contents.items()})


def _versions(old: bytes, new: bytes) -> list[bytes]:
    """Return what a file may have whose last fsync left `old`: that, the new content, half of it, zeros."""
    shortest = min(len(old), len(new))
    same = next((i for i in range(shortest) if old[i] != new[i]), shortest)
    half = new[: same + (len(new) - same) // 2]
    return [*dict.fromkeys((old, new, half, new[:same] + bytes(len(new) - same)))]


def build(tree: Tree, root: Path) -> None:
    """Write an outcome to a new folder."""
    waiting = [(ROOT, root)]
    while waiting:
        inode, folder = waiting.pop()
        folder.mkdir(parents=True)
        for name, number in tree.entries.get(inode, {}).items():
            if number in tree.contents:
                (folder / name).write_bytes(tree.contents[number])
            else:
                waiting.append((number, folder / name))


def crashes(events: Path) -> Iterator[tuple[Tree, list[str]]]:
    """Yield every distinct outcome of a crash after each event, with what had been logged by then."""
    disk, chance, seen = Disk(), random.Random(0), set()
    with events.open("rb") as file:
        while file.peek(1):  # type: ignore[attr-defined]
            disk.apply(pickle.load(file))
            for tree in disk.outcomes(chance):
                reachable = _reachable(tree)
                key = (reachable, len(disk.marks))
                if key not in seen:
                    seen.add(key)
                    yield tree, list(disk.marks)


def _reachable(tree: Tree, inode: int = ROOT) -> int:
    """Return a hash of what can be found from a folder."""
    return hash(
        tuple(
            (name, hash(tree.contents[number]) if number in tree.contents else _reachable(tree, number))
            for name, number in sorted(tree.entries.get(inode, {}).items())
        )
    )
