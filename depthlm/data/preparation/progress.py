"""The progress of a preparation: the file from which the next call resumes, and the bars on the terminal."""

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from depthlm.data.corpora.sources import TextFiles
from depthlm.data.end_of_text import TOKENIZER_CONFIG
from depthlm.data.errors import DataError
from depthlm.data.manifest import FILE_NAME as MANIFEST
from depthlm.data.preparation.split_writer import SplitWriter
from depthlm.data.token_folder import differences
from depthlm.files import read_json, replace_text, sync

FILE_NAME = "progress.json"
# the first file of a folder in preparation, with its settings; a folder without this file is never changed
MARK = "preparing.json"

# Seconds between progress lines where there is no terminal.
LINE_EVERY = 30.0


class Position(NamedTuple):
    """Where reading resumes: the section of the source, its file, and the record of that file, from 0."""

    section: int
    file: int
    record: int


class ProgressFile:
    """progress.json of a folder in preparation, written whenever a shard is complete.

    It is valid only for the same settings, the same state of the source and the same tokenizer.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], files: TextFiles, tokenizer: str) -> None:
        self.file = folder / FILE_NAME
        self.key = {"settings": settings, "source": files.description, "state": files.state, "tokenizer": tokenizer}
        self.times = {"times": files.times}

    def begin(self) -> None:
        """Record that parts of the source are being encoded, unless a shard is complete already."""
        if read(self.file.parent) is None:
            empty = {"position": Position(0, 0, 0), "writers": {}, "left_out": {}}
            write_record(self.file, self.key | self.times | empty)

    def save(self, position: Position, writers: dict[bool, SplitWriter], skipped: Counter[str]) -> None:
        """Record that everything before the position is on the disk."""
        states = {writer.stem: writer.state() for writer in writers.values()}
        progress = {"position": position, "writers": states, "left_out": skipped}
        write_record(self.file, self.key | self.times | progress)

    def restore(self, writers: dict[bool, SplitWriter], skipped: Counter[str]) -> Position | None:
        """Restore the writers and counts and return the position; without a valid file, only return None."""
        record = read(self.file.parent)
        if record is None or any(record[name] != value for name, value in self.key.items()):
            return None
        for writer in writers.values() if record["writers"] else ():
            writer.restore(record["writers"][writer.stem])
        skipped.update(record["left_out"])
        return Position(*record["position"])


def read(folder: Path) -> dict[str, Any] | None:
    """Return the folder's progress record; None without a valid one, or if a file it lists is missing or too short."""
    record = read_record(folder / FILE_NAME)
    if record is None:
        return None
    try:
        sizes = {name: size for state in record["writers"].values() for name, size in state["sizes"].items()}
        complete = all((folder / name).stat().st_size >= size for name, size in sizes.items())
        return record if complete and (folder / "tokenizer.json").is_file() else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def write_record(file: Path, record: dict[str, Any]) -> None:
    """Replace a file's content with a record and its SHA-256."""
    replace_text(file, json.dumps({"record": record, "sha256": _digest(record)}))


def read_record(file: Path) -> dict[str, Any] | None:
    """Return the record that was written, or None if the file is missing or damaged."""
    content = read_json(file)
    record = content.get("record")
    return record if isinstance(record, dict) and content.get("sha256") == _digest(record) else None


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def mark(folder: Path, settings: dict[str, Any]) -> None:
    """Mark a new folder as one in preparation with these settings."""
    replace_text(folder / MARK, json.dumps({"settings": settings}))


def check_mark(folder: Path, settings: dict[str, Any]) -> None:
    """Raise DataError if a folder exists, is not empty, and is not marked as one in preparation with these settings."""
    if not folder.exists():
        return
    marked = _marked_settings(folder)
    # a kill may leave a mark half-written
    if marked is None and folder.is_dir() and all(file.name == f".{MARK}.tmp" for file in folder.iterdir()):
        return
    remedy = "Nothing was changed. Set another data.path, or remove this folder by hand."
    if marked is None:
        raise DataError("in the way of preparing: not a folder that this version began to prepare", folder, remedy)
    # a preparation that failed before its first file has encoded nothing
    encoded = any(file.name not in (MARK, "tokenizer.json", TOKENIZER_CONFIG) for file in folder.iterdir())
    if encoded and (differing := differences(marked, settings)):
        raise DataError(f"an unfinished preparation with other settings ({differing})", folder, remedy)


def clear(folder: Path) -> None:
    """Remove everything from a folder in preparation but its mark."""
    for file in folder.iterdir():
        if file.name != MARK:
            shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()
    sync(folder)


def _marked_settings(folder: Path) -> dict[str, Any] | None:
    # when a complete folder is published, its mark may be removed before the other files
    for name in (MARK, MANIFEST):
        settings = read_json(folder / name).get("settings")
        if isinstance(settings, dict):
            return settings
    return None


@contextmanager
def training_bar(
    console: Console, vocab_size: int, total_bytes: int
) -> Iterator[Callable[[Iterable[str]], Iterator[str]]]:
    """Show a bar while a tokenizer is trained: first for the text it reads, then for the search for merges.

    Yields a function that counts the texts passing through it.
    """
    label = f"training a tokenizer of {vocab_size:,} tokens"
    if not console.is_terminal:
        console.print(label)
    columns = TextColumn(label), BarColumn(), TextColumn("{task.fields[doing]}"), TimeElapsedColumn()
    hidden = console.quiet or not console.is_terminal
    with Progress(*columns, console=console, disable=hidden, transient=True) as bar:
        task = bar.add_task("", total=total_bytes, doing="reading")

        def counted(texts: Iterable[str]) -> Iterator[str]:
            for text in texts:
                bar.advance(task, len(text))
                yield text
            bar.update(task, total=None, doing="finding merges")

        yield counted


class ProgressBar:
    """MB/s of text, tokens and remaining time: a bar on a terminal, a line every LINE_EVERY seconds elsewhere.

    quota: the number of training tokens to prepare; null: all of the source.
    """

    def __init__(self, console: Console, name: str, quota: int | None) -> None:
        self.console, self.name, self.quota = console, name, quota
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[rate]:.1f} MB/s"),
            TextColumn("{task.fields[tokens]:,} tokens"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, disable=console.quiet or not console.is_terminal)
        self._task = self._bar.add_task(f"tokenising {name}", total=1.0, rate=0.0, tokens=0)
        self._started: tuple[float, int, float] | None = None
        self._line_at = time.monotonic() + LINE_EVERY

    def show(self, read: float, writers: dict[bool, SplitWriter]) -> None:
        """Update the display. read: the share of the source that has been read."""
        now, text_bytes = time.monotonic(), sum(writer.bytes for writer in writers.values())
        tokens = sum(writer.tokens for writer in writers.values())
        done = max(read, writers[False].tokens / self.quota) if self.quota else read
        if self._started is None:
            self._started = now, text_bytes, done
        since, bytes_before, done_before = self._started
        rate = (text_bytes - bytes_before) / max(now - since, 1e-9) / 1e6
        self._bar.update(self._task, completed=min(done, 1.0), rate=rate, tokens=tokens)
        if not self.console.is_terminal and now >= self._line_at:
            self._line_at = now + LINE_EVERY
            remaining = (now - since) / max(done - done_before, 1e-9) * (1 - min(done, 1.0))
            self.console.print(
                f"tokenising {self.name}: {100 * min(done, 1.0):.1f}%, {rate:.1f} MB/s, {tokens:,} tokens, "
                f"about {remaining / 60:.0f} minutes left"
            )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
