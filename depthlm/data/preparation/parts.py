"""One corpus prepared by several processes or nodes: each encodes some of its files, and the last one joins them.

Below <folder>.partial, each file of the source has the encoded batches of its documents, and, once it is complete, a
summary. Joining them reads these instead of the text, so the token files have the bytes that one process would have
written. Batches and summaries carry a SHA-256; a file with a batch or summary that differs is encoded again.
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
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from depthlm.data.corpora.documents import REASONS
from depthlm.data.errors import DataError
from depthlm.data.preparation.encode import Batch, Encoded, Job, Piece, encoded_batches
from depthlm.data.preparation.progress import LINE_EVERY, Position, read_record, write_record
from depthlm.data.preparation.split_writer import dtype_of, little_endian
from depthlm.data.tokenizers import Tokenizer

PREFIX = "encoded-"
# seconds between two marks of the progress in a file, from which encoding resumes
MARK_EVERY = 30.0
# the states of a document, stored by their index: good, or the reason why it is bad
BAD = ["", *REASONS]
# a batch begins with the numbers of its pieces and ids, and ends with its digest, of so many bytes
HEAD, DIGEST = np.dtype("<i8"), 32
COLUMNS = 6
_DAMAGED = "or its .json is damaged, and its text must be encoded again"


class DamagedError(Exception):
    """A file of encoded text that is not what was written."""


@dataclass(frozen=True)
class Part:
    """The files with numbers i, i + count, i + 2 count, ... of a source. number: from 0."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"part {self.number} of {self.count}"


@dataclass(frozen=True)
class Totals:
    """The numbers of training tokens and of held-out documents among encoded documents."""

    train_tokens: int = 0
    held_out: int = 0

    @classmethod
    def from_rows(cls, rows: NDArray[np.int64]) -> "Totals":
        """Return the totals of a batch."""
        tokens, held, last, bad = rows[:, 1], rows[:, 3] > 0, rows[:, 4] > 0, rows[:, 5] > 0
        return cls(int(tokens[~held].sum()), int((held & last & ~bad).sum()))

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(self.train_tokens + other.train_tokens, self.held_out + other.held_out)

    def is_enough(self, quota: int | None) -> bool:
        """Return whether these documents suffice: the quota is full, and a document is held out."""
        return quota is not None and self.train_tokens >= quota and self.held_out > 0


def folder_of(job: Job, partial: Path) -> Path:
    """Return the folder of the encoded files, which depends on the text, since another part may read changed text."""
    state = json.dumps([job.files.description, job.files.state], sort_keys=True, default=str)
    return partial / f"{PREFIX}{sha256(state.encode()).hexdigest()[:16]}"


def encode_part(job: Job, tokenizer: Tokenizer, partial: Path, part: Part, console: Console) -> int:
    """Encode the files of a part that are not complete yet, as far as the quota needs them. Returns their number.

    A file that was interrupted resumes from its last mark.
    """
    folder = folder_of(job, partial)
    folder.mkdir(exist_ok=True)
    encoded, files = 0, _files(job)
    complete: dict[tuple[int, int], Totals] = {}
    before, line_at = Totals(), time.monotonic() + LINE_EVERY
    for number, file in enumerate(files):
        if number % part.count != part.number or _totals(folder, *file) is not None:
            continue
        if job.quota is not None:
            for earlier in files[:number]:
                if earlier not in complete and (totals := _totals(folder, *earlier)) is not None:
                    complete[earlier] = totals
                    before += totals
            if before.is_enough(job.quota):
                break
        encoded += _encode_file(job, tokenizer, folder, *file, console)
        if time.monotonic() >= line_at:
            line_at = time.monotonic() + LINE_EVERY
            console.print(f"{part}: {encoded} files encoded, the last one is {number + 1} of {len(files)}")
    return encoded


def missing_files(job: Job, partial: Path, console: Console) -> int:
    """Return how many of the files that the quota needs no part has encoded yet, and print which are damaged."""
    folder, before, missing = folder_of(job, partial), Totals(), 0
    for file in _files(job):
        if before.is_enough(job.quota):
            break
        totals = _totals(folder, *file)
        missing += totals is None
        path = _path(folder, *file)
        if totals is None and path.with_suffix(".json").exists():
            console.print(
                f"{path} {_DAMAGED}; the command of its part, or the one without --part, does that", markup=False
            )
        before += totals or Totals()
    return missing


def stored_batches(
    job: Job, tokenizer: Tokenizer, partial: Path, console: Console, position: Position
) -> Generator[tuple[Batch, Encoded]]:
    """Yield the encoded batches of all files from a position on, in the order of the source.

    A damaged file is encoded again. Raises DataError if it is damaged again.
    """
    files = _files(job)
    for number, (section, index) in enumerate(files):
        if (section, index) < position[:2]:
            continue
        start = position.record if (section, index) == position[:2] else 0
        num_yielded, path = 0, _path(folder_of(job, partial), section, index)
        for attempt in range(2):
            try:
                for rows, ids in _read(path, little_endian(dtype_of(job.vocab_size)), start, num_yielded):
                    pieces = [
                        Piece(bool(held), "", bool(last), Position(section, index, after), BAD[bad])
                        for after, _, _, held, last, bad in rows.tolist()
                    ]
                    num_yielded += len(pieces)
                    yield (
                        Batch(pieces, (number + 1) / len(files)),
                        Encoded(ids, rows[:, 1].tolist(), rows[:, 2].tolist()),
                    )
                break
            except DamagedError as error:
                if attempt:
                    remedy = "Check the disk, then run the same command again: it encodes this file again."
                    raise DataError(f"encoded text is damaged again ({error})", path, remedy) from error
                console.print(f"{path} is damaged ({error}); encoding its text again", markup=False)
                for suffix in (".json", ".mark"):
                    path.with_suffix(suffix).unlink(missing_ok=True)
                _encode_file(job, tokenizer, path.parent, section, index, console)


def _files(job: Job) -> list[tuple[int, int]]:
    """Return the section and the number of each file, in the order in which they are read."""
    return [(section, index) for section, (files, _) in enumerate(job.sections) for index in range(len(files))]


def _path(folder: Path, section: int, index: int) -> Path:
    return folder / f"{section}-{index:06d}.batches"


def _totals(folder: Path, section: int, index: int) -> Totals | None:
    """Return the totals of a complete file; None if its summary is missing or damaged, or its length is wrong."""
    path = _path(folder, section, index)
    summary = read_record(path.with_suffix(".json"))
    if summary is None or not path.is_file() or path.stat().st_size != summary["size"]:
        return None
    return Totals(**summary["totals"])


def _encode_file(job: Job, tokenizer: Tokenizer, folder: Path, section: int, index: int, console: Console) -> bool:
    """Encode a file. Return false if another process encoded it meanwhile."""
    path = _path(folder, section, index)
    path.touch()
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if _totals(folder, section, index) is not None:
            return False
        record, size, totals = _read_mark(path)
        if path.with_suffix(".json").exists():
            console.print(f"{path} {_DAMAGED}", markup=False)
            record, size, totals = 0, 0, Totals()
        file.seek(size)
        file.truncate()
        start, marked = Position(section, index, record), time.monotonic()
        with closing(encoded_batches(job, tokenizer, start, files=[(section, index)])) as batches:
            for batch, encoded in batches if not totals.is_enough(job.quota) else ():
                rows = _rows(batch, encoded)
                _write(file, rows, encoded.ids)
                totals += Totals.from_rows(rows)
                # a batch may end within a document, whose other pieces would be read again
                if not batch.pieces[-1].last:
                    continue
                if totals.is_enough(job.quota):
                    break
                if time.monotonic() - marked >= MARK_EVERY:
                    _sync(file)
                    mark = {"record": batch.pieces[-1].after.record, "size": file.tell(), "totals": asdict(totals)}
                    write_record(path.with_suffix(".mark"), mark)
                    marked = time.monotonic()
        _sync(file)
        write_record(path.with_suffix(".json"), {"size": file.tell(), "totals": asdict(totals)})
    return True


def _read_mark(path: Path) -> tuple[int, int, Totals]:
    """Return the record and the size from which encoding a file resumes, and the totals of what precedes them."""
    mark = read_record(path.with_suffix(".mark"))
    if mark is None or path.stat().st_size < mark["size"]:
        return 0, 0, Totals()
    return mark["record"], mark["size"], Totals(**mark["totals"])


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


def _write(file: IO[bytes], rows: NDArray[np.int64], ids: NDArray[np.integer]) -> None:
    content = np.array([len(rows), len(ids)], HEAD).tobytes() + rows.astype(HEAD).tobytes() + ids.tobytes()
    file.write(content + sha256(content).digest())


def _read(
    path: Path, dtype: np.dtype[Any], start: int, skip: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.integer]]]:
    """Yield the batches of a complete file, without the pieces before record `start`, nor the next `skip` pieces.

    dtype: of the ids. Raises DamagedError if the content is not what was written.
    """
    with path.open("rb") as file:
        remaining = os.fstat(file.fileno()).st_size
        while remaining:
            head = file.read(2 * HEAD.itemsize)
            pieces, tokens = np.frombuffer(head, HEAD).tolist() if len(head) == 2 * HEAD.itemsize else (0, 0)
            sizes = pieces * COLUMNS * HEAD.itemsize, tokens * dtype.itemsize
            length = len(head) + sum(sizes) + DIGEST
            if min(pieces, tokens) < 0 or not pieces or length > remaining:
                raise DamagedError(f"the batch {remaining:,} bytes before its end has no such length")
            content = file.read(sum(sizes))
            if sha256(head + content).digest() != file.read(DIGEST):
                raise DamagedError(f"the batch {remaining:,} bytes before its end differs from its SHA-256")
            remaining -= length
            rows = np.frombuffer(content[: sizes[0]], HEAD).reshape(-1, COLUMNS).astype(np.int64)
            ids = np.frombuffer(content[sizes[0] :], dtype)
            candidates = rows[:, 0] > start
            selected = candidates & (np.cumsum(candidates) > skip)
            skip -= int(candidates.sum() - selected.sum())
            if selected.any():
                yield rows[selected], ids[np.repeat(selected, rows[:, 1])]
