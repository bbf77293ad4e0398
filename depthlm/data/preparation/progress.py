"""The progress of a preparation: the writer of its token files, the record from which it resumes, and its bar."""

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from depthlm.counts import duration_text
from depthlm.data.corpora.sources import TextFiles
from depthlm.data.manifest import FILE_NAME as MANIFEST
from depthlm.data.manifest import Shard, Split, little_endian
from depthlm.data.token_files import differences
from depthlm.data.tokenizers import TOKENIZER_CONFIG, Tokenizer
from depthlm.errors import DataError
from depthlm.files import add_digest, is_intact, read_json, replace_text, sync

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


class SplitWriter:
    """Writes <stem>-00000.bin, <stem>-00001.bin, ... of shard_tokens tokens each; the last may be shorter.

    tokens, documents, bytes: counts so far; bytes are of UTF-8 text. shards: the complete files.
    """

    def __init__(self, folder: Path, stem: str, dtype: str, vocab_size: int, shard_tokens: int) -> None:
        self.folder, self.stem, self.dtype, self.shard_tokens = folder, stem, little_endian(dtype), shard_tokens
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.documents = self.bytes = self.tokens = 0
        self.shards: list[Shard] = []
        self._file: IO[bytes] | None = None
        self._length = 0

    def add(self, ids: NDArray[np.integer], documents: int, text_bytes: int) -> None:
        """Append tokens, ids[n], that end `documents` documents and encode `text_bytes` bytes of text."""
        self.tokens += len(ids)
        self.documents += documents
        self.bytes += text_bytes
        self.counts += np.bincount(ids, minlength=len(self.counts))
        encoded = np.ascontiguousarray(ids, dtype=self.dtype)
        while len(encoded):
            if self._file is None:
                self._open("wb")
            part, encoded = np.split(encoded, [self.shard_tokens - self._length])
            self._write(part.tobytes())
            self._length += len(part)
            if self._length == self.shard_tokens:
                self._close()

    def state(self) -> dict[str, Any]:
        """Flush the open file to the disk and return what `restore` needs."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        numbers = {name: getattr(self, name) for name in ("tokens", "documents", "bytes")}
        lengths = {shard.name: shard.tokens for shard in self.shards} | {self._name: self._length}
        return numbers | {
            "shards": [asdict(shard) for shard in self.shards],
            "open": self._length,
            "open_sha256": self._digest.hexdigest() if self._file is not None else None,
            "sizes": {name: tokens * self.dtype.itemsize for name, tokens in lengths.items() if tokens},
            "counts": self.counts.tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a state; each file must be at least as long as its `sizes` say.

        Raises DataError if the content of the file that was open is not what was written.
        """
        self.tokens, self.documents, self.bytes = (state[name] for name in ("tokens", "documents", "bytes"))
        self.counts = np.array(state["counts"], dtype=np.int64)
        self.shards = [Shard(**shard) for shard in state["shards"]]
        if state["open"]:
            self._open("r+b")
            assert self._file is not None
            self._file.truncate(state["open"] * self.dtype.itemsize)
            self._digest = hashlib.file_digest(self._file, "sha256")  # type: ignore[arg-type]
            if self._digest.hexdigest() != state["open_sha256"]:
                remedy = "Check the disk, remove this folder by hand, and run the same command again."
                raise DataError(f"{self._name} is damaged: it differs from its SHA-256", self.folder, remedy)
            self._length = state["open"]

    def finish(self, unknown: int | None = None) -> Split:
        """Close the last file and return the record of the split.

        unknown: the id of the unknown token, if there is one. The record of training text has the unigram entropy.
        """
        self._close()
        share = self.counts[self.counts > 0] / max(1, self.counts.sum())
        nats = float(-(share * np.log(share)).sum()) if self.stem == "train" and self.tokens else None
        hidden = 0 if unknown is None else int(self.counts[unknown])
        return Split(self.tokens, self.documents, self.bytes, tuple(self.shards), nats, hidden)

    @property
    def _name(self) -> str:
        return f"{self.stem}-{len(self.shards):05d}.bin"

    def _open(self, mode: str) -> None:
        # unbuffered: after a full disk has refused a write, a destructor would try it again
        self._file = open(self.folder / self._name, mode, buffering=0)  # noqa: SIM115 -- closed in `_close`
        self._digest, self._length = hashlib.sha256(), 0

    def _write(self, content: bytes) -> None:
        assert self._file is not None
        self._digest.update(content)
        view = memoryview(content)
        while view:
            view = view[self._file.write(view) :]

    def _close(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self.shards.append(Shard(self._name, self._length, self._digest.hexdigest()))
            self._file, self._length = None, 0


class ProgressFile:
    """progress.json of a folder in preparation, written whenever a shard is complete.

    It is valid only for the same settings, the same state of the source and the same tokenizer.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], files: TextFiles, tokenizer: str) -> None:
        self.file = folder / FILE_NAME
        self.key = {"settings": settings, "source": files.description, "state": files.state, "tokenizer": tokenizer}
        self.times = files.times

    def save(self, position: Position, writers: dict[bool, SplitWriter], skipped: Counter[str]) -> None:
        """Record that everything before the position is on the disk."""
        states = {writer.stem: writer.state() for writer in writers.values()}
        progress = {"position": position, "writers": states, "left_out": skipped}
        replace_text(self.file, json.dumps(add_digest(self.key | {"times": self.times} | progress)))

    def restore(self, writers: dict[bool, SplitWriter], skipped: Counter[str]) -> Position | None:
        """Restore the writers and counts and return the position; without a valid file, only return None."""
        record = read(self.file.parent)
        if record is None or any(record[name] != value for name, value in self.key.items()):
            return None
        for writer in writers.values():
            writer.restore(record["writers"][writer.stem])
        skipped.update(record["left_out"])
        return Position(*record["position"])


def read(folder: Path) -> dict[str, Any] | None:
    """Return the folder's progress record; None without a valid one, or if a file it lists is missing or too short."""
    record = read_json(folder / FILE_NAME)
    if not is_intact(record) or not (folder / "tokenizer.json").is_file():
        return None
    sizes = {name: size for state in record["writers"].values() for name, size in state["sizes"].items()}
    with suppress(OSError):
        if all((folder / name).stat().st_size >= size for name, size in sizes.items()):
            return record
    return None


def check_mark(folder: Path, settings: dict[str, Any]) -> None:
    """Raise DataError if a folder exists, is not empty, and is not marked as one in preparation with these settings."""
    if not folder.exists():
        return
    # when a complete folder is published, its mark may be removed before the other files
    records = (read_json(folder / name).get("settings") for name in (MARK, MANIFEST))
    marked = next((value for value in records if isinstance(value, dict)), None)
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


def begin(folder: Path, settings: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Mark a folder, which is new or cleared, as one in preparation with these settings, and save the tokenizer."""
    folder.mkdir(exist_ok=True)
    replace_text(folder / MARK, json.dumps({"settings": settings}))
    sync(tokenizer.save(folder))


class ProgressBar(Progress):
    """MB/s of text, tokens and remaining time: a bar on a terminal, a line every LINE_EVERY seconds elsewhere.

    quota: the number of training tokens to prepare; null: all of the source.
    """

    def __init__(self, console: Console, name: str, quota: int | None) -> None:
        self.name, self.quota = name, quota
        columns = BarColumn(), TextColumn("{task.description}")
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._bar = self.add_task(f"tokenising {name}", total=1.0)
        self._started: tuple[float, int, float] | None = None
        self._line_at = time.monotonic() + LINE_EVERY

    def show(self, read: float, writers: dict[bool, SplitWriter]) -> None:
        """Update the display. read: the share of the source that has been read."""
        now, text_bytes = time.monotonic(), sum(writer.bytes for writer in writers.values())
        tokens = sum(writer.tokens for writer in writers.values())
        done = min(1.0, max(read, writers[False].tokens / self.quota) if self.quota else read)
        if self._started is None:
            self._started = now, text_bytes, done
        since, bytes_before, done_before = self._started
        rate = (text_bytes - bytes_before) / max(now - since, 1e-9) / 1e6
        text = f"tokenising {self.name}: {done:.1%}, {rate:.1f} MB/s, {tokens:,} tokens"
        if done > done_before:
            text += f", about {duration_text((now - since) / (done - done_before) * (1 - done))} left"
        self.update(self._bar, completed=done, description=text)
        if not self.console.is_terminal and now >= self._line_at:
            self._line_at = now + LINE_EVERY
            self.console.print(text)
