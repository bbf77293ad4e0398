"""One corpus prepared by several processes or nodes: each encodes some of its files, and the last one joins them.

Below <folder>.partial, each file of the source has the encoded batches of its documents, and, once it is complete, a
summary with their SHA-256. Joining them reads these instead of the text, so the token files have the bytes that one
process would have written. A file that differs from its summary is encoded again.
"""

import fcntl
import hashlib
import io
import json
import os
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from depthlm.data.preparation.encode import Encoded, Job, encoded_batches
from depthlm.data.preparation.progress import LINE_EVERY, Position
from depthlm.errors import DataError
from depthlm.files import digest, read_record, write_record

PREFIX = "encoded-"
# seconds between two marks of the progress in a file, from which encoding resumes
MARK_EVERY = 30.0
_DAMAGED = "or its .json is damaged, and its text must be encoded again"


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
    def from_rows(cls, rows: NDArray[np.void]) -> "Totals":
        """Return the totals of a batch."""
        return cls(int(rows["tokens"][~rows["held_out"]].sum()), int((rows["held_out"] & rows["last"]).sum()))

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(self.train_tokens + other.train_tokens, self.held_out + other.held_out)

    def is_enough(self, quota: int | None) -> bool:
        """Return whether these documents suffice: the quota is full, and a document is held out."""
        return quota is not None and self.train_tokens >= quota and self.held_out > 0


def folder_of(job: Job) -> Path:
    """Return the folder of the encoded files, which depends on the text, since another part may read changed text."""
    state = json.dumps([job.files.description, job.files.state], sort_keys=True, default=str)
    return job.folder / f"{PREFIX}{hashlib.sha256(state.encode()).hexdigest()[:16]}"


def encode_part(job: Job, part: Part) -> int:
    """Encode the files of a part that are not complete yet, as far as the quota needs them. Returns their number.

    A file that was interrupted resumes from its last mark.
    """
    folder = folder_of(job)
    folder.mkdir(exist_ok=True)
    encoded, files = 0, _files(job)
    complete: dict[tuple[int, int], Totals] = {}
    before, line_at = Totals(), time.monotonic() + LINE_EVERY
    for number, file in enumerate(files):
        if number % part.count != part.number or _totals(_path(folder, *file)) is not None:
            continue
        if job.quota is not None:
            for earlier in files[:number]:
                if earlier not in complete and (totals := _totals(_path(folder, *earlier))) is not None:
                    complete[earlier] = totals
                    before += totals
            if before.is_enough(job.quota):
                break
        encoded += _encode_file(job, _path(folder, *file), *file)
        if time.monotonic() >= line_at:
            line_at = time.monotonic() + LINE_EVERY
            job.console.print(f"{part}: {encoded} files encoded, the last one is {number + 1} of {len(files)}")
    return encoded


def missing_files(job: Job) -> int:
    """Return how many of the files that the quota needs no part has encoded yet, and print which are damaged."""
    folder, before, missing = folder_of(job), Totals(), 0
    for file in _files(job):
        if before.is_enough(job.quota):
            break
        path = _path(folder, *file)
        totals = _totals(path)
        missing += totals is None
        if totals is None and path.with_suffix(".json").exists():
            job.console.print(
                f"{path} {_DAMAGED}; the command of its part, or the one without --part, does that", markup=False
            )
        before += totals or Totals()
    return missing


def stored_batches(job: Job, position: Position) -> Generator[Encoded]:
    """Yield the encoded batches of all files from a position on, in the order of the source.

    A damaged file is encoded again. Raises DataError if it is damaged again.
    """
    files = _files(job)
    for number, (section, index) in enumerate(files):
        if (section, index) < position[:2]:
            continue
        path = _path(folder_of(job), section, index)
        if not _is_intact(path):
            job.console.print(f"{path} is damaged (it differs from its SHA-256); encoding its text again", markup=False)
            for suffix in (".json", ".mark"):
                path.with_suffix(suffix).unlink(missing_ok=True)
            _encode_file(job, path, section, index)
            if not _is_intact(path):
                remedy = "Check the disk, then run the same command again: it encodes this file again."
                raise DataError("encoded text is damaged again (it differs from its SHA-256)", path, remedy)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while file.tell() < size:
                rows, ids = np.load(file), np.load(file)
                if (section, index) == position[:2]:
                    later = rows["record"] > position.record
                    rows, ids = rows[later], ids[np.repeat(later, rows["tokens"])]
                if len(rows):
                    yield Encoded(rows, ids, (number + 1) / len(files))


def _files(job: Job) -> list[tuple[int, int]]:
    """Return the section and the number of each file, in the order in which they are read."""
    return [(section, index) for section, (files, _) in enumerate(job.sections) for index in range(len(files))]


def _path(folder: Path, section: int, index: int) -> Path:
    return folder / f"{section}-{index:06d}.batches"


def _totals(path: Path) -> Totals | None:
    """Return the totals of a complete file; None if its summary is missing or damaged, or its length is wrong."""
    summary = read_record(path.with_suffix(".json"))
    if summary is None or not path.is_file() or path.stat().st_size != summary["size"]:
        return None
    return Totals(**summary["totals"])


def _is_intact(path: Path) -> bool:
    """Return whether a complete file has the content of which its summary has the SHA-256."""
    summary = read_record(path.with_suffix(".json"))
    return summary is not None and digest(path) == summary.get("sha256")


def _encode_file(job: Job, path: Path, section: int, index: int) -> bool:
    """Encode a file. Return false if another process encoded it meanwhile."""
    path.touch()
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if _totals(path) is not None:
            return False
        record, totals, sha256 = 0, Totals(), hashlib.sha256()
        mark = read_record(path.with_suffix(".mark"))
        if path.with_suffix(".json").exists():
            job.console.print(f"{path} {_DAMAGED}", markup=False)
        elif mark is not None:
            file.truncate(mark["size"])
            if (prefix := hashlib.file_digest(file, "sha256")).hexdigest() == mark.get("sha256"):
                record, totals, sha256 = mark["record"], Totals(**mark["totals"]), prefix
        if record == 0:
            file.seek(0)
            file.truncate()

        def summary() -> dict[str, object]:
            _sync(file)
            return {"size": file.tell(), "sha256": sha256.hexdigest(), "totals": asdict(totals)}

        start, marked = Position(section, index, record), time.monotonic()
        with closing(encoded_batches(job, start, one_file=True)) as batches:
            for batch in batches if not totals.is_enough(job.quota) else ():
                sha256.update(_write(file, batch.rows, batch.ids))
                totals += Totals.from_rows(batch.rows)
                # a batch may end within a document, whose other pieces would be read again
                if not batch.rows["last"][-1]:
                    continue
                if totals.is_enough(job.quota):
                    break
                if time.monotonic() - marked >= MARK_EVERY:
                    write_record(path.with_suffix(".mark"), summary() | {"record": batch.after.record})
                    marked = time.monotonic()
        write_record(path.with_suffix(".json"), summary())
    return True


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _write(file: IO[bytes], rows: NDArray[np.void], ids: NDArray[np.integer]) -> bytes:
    """Append a batch and return its bytes."""
    content = io.BytesIO()
    np.save(content, rows)
    np.save(content, ids)
    file.write(content.getvalue())
    return content.getvalue()
