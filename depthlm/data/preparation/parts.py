"""One corpus prepared by several processes or nodes: each encodes some of its files, and the last one joins them.

Below <folder>.partial, each file of the source has the encoded batches of its documents, and, once it is complete, a
summary. Joining them reads these instead of the text, so the token files have the bytes that one process would have
written.
"""

import fcntl
import json
import os
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from depthlm.data.corpora.documents import REASONS
from depthlm.data.preparation.encode import Batch, Encoded, Job, Piece, encoded_batches
from depthlm.data.preparation.progress import LINE_EVERY, Position
from depthlm.data.tokenizers import Tokenizer
from depthlm.files import replace_text

PREFIX = "encoded-"
# seconds between two marks of how far a file is, from which it resumes
MARK_EVERY = 30.0
# what a bad document is, by number; 0: it is good
BAD = ["", *REASONS]


@dataclass(frozen=True)
class Part:
    """The files with numbers i, i + count, i + 2 count, ... of a source. number: from 0."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"part {self.number} of {self.count}"


@dataclass(frozen=True)
class Totals:
    """What encoded documents have: training tokens, and documents that are held out."""

    train_tokens: int = 0
    held_out: int = 0

    @classmethod
    def of(cls, rows: NDArray[np.int64]) -> "Totals":
        """Return those of a batch."""
        tokens, held, last, bad = rows[:, 1], rows[:, 3] > 0, rows[:, 4] > 0, rows[:, 5] > 0
        return cls(int(tokens[~held].sum()), int((held & last & ~bad).sum()))

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(self.train_tokens + other.train_tokens, self.held_out + other.held_out)

    def fill(self, quota: int | None) -> bool:
        """Return whether nothing more is needed: the quota is full, and a document is held out."""
        return quota is not None and self.train_tokens >= quota and self.held_out > 0


def folder_of(job: Job, partial: Path) -> Path:
    """Return the folder of the encoded files; another one for other text, which another part may have found."""
    state = json.dumps([job.files.description, job.files.state], sort_keys=True, default=str)
    return partial / f"{PREFIX}{sha256(state.encode()).hexdigest()[:16]}"


def encode_part(job: Job, tokenizer: Tokenizer, partial: Path, part: Part, console: Console) -> int:
    """Encode the files of a part that are not complete yet, as far as the quota needs them. Returns their number.

    A file that was interrupted resumes from its last mark.
    """
    folder = folder_of(job, partial)
    folder.mkdir(exist_ok=True)
    encoded, files = 0, _files(job)
    known: dict[tuple[int, int], Totals] = {}
    before, line_at = Totals(), time.monotonic() + LINE_EVERY
    for number, file in enumerate(files):
        if number % part.count != part.number or _totals(folder, *file) is not None:
            continue
        if job.quota is not None:
            for one in files[:number]:
                if one not in known and (totals := _totals(folder, *one)) is not None:
                    known[one] = totals
                    before += totals
            if before.fill(job.quota):
                break
        encoded += _encode_file(job, tokenizer, folder, *file)
        if time.monotonic() >= line_at:
            line_at = time.monotonic() + LINE_EVERY
            console.print(f"{part}: {encoded} files encoded, the last one is {number + 1} of {len(files)}")
    return encoded


def missing_files(job: Job, partial: Path) -> int:
    """Return how many files that the quota needs are not encoded yet, by any part."""
    folder, before, missing = folder_of(job, partial), Totals(), 0
    for file in _files(job):
        if before.fill(job.quota):
            break
        totals = _totals(folder, *file)
        missing += totals is None
        before += totals or Totals()
    return missing


def stored_batches(job: Job, partial: Path, position: Position) -> Generator[tuple[Batch, Encoded]]:
    """Yield the encoded batches of all files from a position on, in the order of the source."""
    folder, files = folder_of(job, partial), _files(job)
    for number, (section, index) in enumerate(files):
        if (section, index) < position[:2]:
            continue
        first = position.record if (section, index) == position[:2] else 0
        with _path(folder, section, index).open("rb") as file:
            for rows, ids in _read(file):
                kept = rows[:, 0] > first
                ids = ids[np.repeat(kept, rows[:, 1])]
                pieces = [
                    Piece(bool(held), "", bool(last), Position(section, index, after), BAD[bad])
                    for after, _, _, held, last, bad in rows[kept].tolist()
                ]
                if pieces:
                    done = (number + 1) / len(files)
                    yield Batch(pieces, done), Encoded(ids, rows[kept, 1].tolist(), rows[kept, 2].tolist())


def _files(job: Job) -> list[tuple[int, int]]:
    """Return the section and the number of each file, in the order in which they are read."""
    return [(section, index) for section, (files, _) in enumerate(job.sections) for index in range(len(files))]


def _path(folder: Path, section: int, index: int) -> Path:
    return folder / f"{section}-{index:06d}.npy"


def _totals(folder: Path, section: int, index: int) -> Totals | None:
    """Return the summary of a complete file, else None."""
    try:
        return Totals(**json.loads(_path(folder, section, index).with_suffix(".json").read_text()))
    except FileNotFoundError:
        return None


def _encode_file(job: Job, tokenizer: Tokenizer, folder: Path, section: int, index: int) -> bool:
    """Encode a file; return whether this process did it, and not another one at the same time."""
    path = _path(folder, section, index)
    path.touch()
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if _totals(folder, section, index) is not None:
            return False
        record, size, totals = _read_mark(path)
        file.seek(size)
        file.truncate()
        start, marked = Position(section, index, record), time.monotonic()
        with closing(encoded_batches(job, tokenizer, start, files=[(section, index)])) as batches:
            for batch, encoded in batches if not totals.fill(job.quota) else ():
                rows = _rows(batch, encoded)
                np.save(file, rows)
                np.save(file, encoded.ids)
                totals += Totals.of(rows)
                # a batch may end within a document, whose other pieces would be read again
                if not batch.pieces[-1].last:
                    continue
                if totals.fill(job.quota):
                    break
                if time.monotonic() - marked >= MARK_EVERY:
                    _sync(file)
                    mark = {"record": batch.pieces[-1].after.record, "size": file.tell(), "totals": asdict(totals)}
                    replace_text(path.with_suffix(".mark"), json.dumps(mark))
                    marked = time.monotonic()
        _sync(file)
        replace_text(path.with_suffix(".json"), json.dumps(asdict(totals)))
    return True


def _read_mark(path: Path) -> tuple[int, int, Totals]:
    """Return how far a file is: the record and the size from which it resumes, and the totals until there."""
    try:
        mark = json.loads(path.with_suffix(".mark").read_text())
        return mark["record"], mark["size"], Totals(**mark["totals"])
    except FileNotFoundError:
        return 0, 0, Totals()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _rows(batch: Batch, encoded: Encoded) -> NDArray[np.int64]:
    """Return for each piece: the next record, tokens, bytes, whether held out, whether last, what is bad; [n, 6]."""
    columns = [
        (piece.after.record, tokens, size, piece.held_out, piece.last, BAD.index(piece.bad))
        for piece, tokens, size in zip(batch.pieces, encoded.tokens, encoded.bytes, strict=True)
    ]
    return np.array(columns, dtype=np.int64)


def _read(file: IO[bytes]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.integer]]]:
    """Yield the batches of a complete file."""
    while True:
        try:
            rows = np.load(file, allow_pickle=False)
        except EOFError:
            return
        yield rows, np.load(file, allow_pickle=False)
