"""Token files made from files of token ids that were tokenized elsewhere, such as published validation sets."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from depthlm.console import stderr_console
from depthlm.data.corpora.documents import document_digest, share_of
from depthlm.data.manifest import VERSION, Manifest, dtype_of, little_endian
from depthlm.data.preparation import progress as progress_file
from depthlm.data.preparation.prepare import check_empty, check_name, lock_tokens, publish
from depthlm.data.preparation.progress import SplitWriter
from depthlm.data.settings import SHARD_TOKENS
from depthlm.data.tokenizers import Tokenizer
from depthlm.errors import DataError
from depthlm.files import open_regular

DTYPES = ("uint16", "uint32", "uint64", "int32", "int64")
# ids in memory at a time
CHUNK = 2**22
# the first bytes of a .npy file with a header; many files of this name have none
NPY = b"\x93NUMPY"
# characters of the reason why a header cannot be read
LONGEST_REASON = 200


class _TextBytes:
    """Counts the UTF-8 bytes of the text of documents that come in parts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.lengths = tokenizer, tokenizer.byte_lengths()
        self.unfinished = np.empty(0, np.int64)

    def of(self, ids: NDArray[np.int64]) -> int:
        """Return the bytes of the next ids, [n]; where only documents have bytes, those of the documents ended."""
        if self.lengths is not None:
            return int(self.lengths[ids].sum())
        # the text of a part depends on what is before it: bytes of one character, a space that decoding strips
        ids = np.concatenate([self.unfinished, ids])
        *documents, self.unfinished = np.split(ids, np.flatnonzero(ids == self.tokenizer.end_of_text) + 1)
        return sum(len(self.tokenizer.decode(document[:-1]).encode()) for document in documents)


class _Ids:
    """The ids of a file, which are read in parts, and from the file alone: it may change at any time.

    dtype: as they are stored. start: the byte at which they begin. Raises DataError where they cannot be read.
    """

    def __init__(self, file: Path, dtype: str | None) -> None:
        self.file, self.sha256 = file, ""
        with self._open() as stream:
            self.stamp = self._stamp(stream)
            has_header = stream.read(len(NPY)) == NPY
            stream.seek(0)
            shape: tuple[int, ...] | None = None
            if has_header:
                shape, self.dtype = _header(file, stream)
            elif dtype is None:
                what = "the file has no header that says the dtype of its ids"
                raise DataError(what, file, "Set --dtype, such as uint32.")
            else:
                self.dtype = little_endian(dtype)
            self.start = stream.tell()
        width, size = self.dtype.itemsize, self.stamp[0] - self.start
        if shape is not None and (
            len(shape) != 1 or self.dtype.name not in DTYPES or dtype not in (None, self.dtype.name)
        ):
            what = f"an array of {len(shape)} dimensions and dtype {self.dtype}"
            raise DataError(what, file, f"Give ids [n] of {dtype or ' or '.join(DTYPES)}.")
        if size % width:
            raise DataError(f"{size} bytes are no whole number of ids of {width} bytes", file, "Check --dtype.")
        self.count = size // width
        if shape is not None and shape[0] != self.count:
            what = f"the header says {shape[0]:,} ids, and the file has {self.count:,}"
            raise DataError(what, file, "Write the file again, or give the ids without a header.")
        if not self.count:
            raise DataError("no ids", file, "Leave this file out.")

    def parts(self) -> Iterator[NDArray[np.integer]]:
        """Yield the ids in their order. Raises DataError if the file changes, also since it was read before."""
        sha256, width = hashlib.sha256(), self.dtype.itemsize
        with self._open() as stream:
            stream.seek(self.start)
            for first in range(0, self.count, CHUNK):
                content = stream.read(size := width * min(CHUNK, self.count - first))
                if len(content) < size:
                    break
                sha256.update(content)
                yield np.frombuffer(content, self.dtype)
            stamp = self._stamp(stream)
        if stamp != self.stamp or self.sha256 not in ("", sha256.hexdigest()):
            remedy = "Wait until it is complete, then run the same command again."
            raise DataError("the file changed while it was read", self.file, remedy)
        self.sha256 = sha256.hexdigest()

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        try:
            stream = open_regular(self.file)
        except (OSError, ValueError) as error:
            remedy = "Give a flat array of ids, with or without a header."
            raise DataError(f"cannot read ids ({error})", self.file, remedy) from None
        with stream:
            yield stream

    @staticmethod
    def _stamp(stream: BinaryIO) -> tuple[int, int]:
        status = os.fstat(stream.fileno())
        return status.st_size, status.st_mtime_ns


def _header(file: Path, stream: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read the header of a .npy: its shape and dtype. Raises DataError."""
    from numpy.lib import format as npy

    try:
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(stream)]
        shape, _, dtype = read(stream)
        if any(type(length) is not int or length < 0 for length in shape):
            raise ValueError(f"a shape of {shape}")
    except Exception as error:  # numpy evaluates the header as Python, which may raise anything
        reason = str(error).partition("\n")[0][:LONGEST_REASON]
        what = f"the header of a .npy cannot be read ({type(error).__name__}: {reason})"
        raise DataError(what, file, "Write the file again, or give the ids without a header.") from None
    return shape, dtype


@dataclass(frozen=True)
class Import:
    """Files of ids, which follow one another as one sequence of documents, and the folder of token files to make.

    dtype: of the ids in files without a header, little-endian. held_out: the share of the documents in the validation
    set, chosen by a hash of their ids; 1: all, as in a validation set.
    """

    files: Sequence[Path]
    dtype: str | None
    tokenizer: Tokenizer
    folder: Path
    held_out: float = 1.0
    shard_tokens: int = SHARD_TOKENS


def import_tokens(job: Import) -> Manifest:
    """Make the token files, and return their manifest. A folder that already has this content stays.

    Raises DataError where a file cannot be read, changes, has another dtype or an id beyond the vocabulary, the last
    document has no end of text, a split would have no document, or the folder cannot be written.
    """
    target = job.folder.resolve()
    check_name(target.name)
    files = [_Ids(file, job.dtype) for file in job.files]
    remedy = "Free some space or fix the cause, then run the same command again."
    with lock_tokens(target, remedy, stderr_console()) as is_complete:
        flags = _find_held_out(job, files)
        settings = {
            "version": VERSION,
            "imported": [[str(ids.file.resolve()), ids.sha256, str(ids.dtype)] for ids in files],
            "tokenizer": job.tokenizer.fingerprint,
            "end_of_text": job.tokenizer.end.token,
            "validation_fraction": job.held_out,
        }
        if is_complete:
            manifest = Manifest.read(target)
            if manifest.settings != settings:
                raise DataError("the folder has other token files", job.folder, "Set another --to, or remove it.")
            return manifest
        check_empty(target)
        partial = target.with_name(f"{target.name}.partial")
        progress_file.check_mark(partial, settings)
        if partial.exists():
            progress_file.clear(partial)
        progress_file.begin(partial, settings, job.tokenizer)
        manifest = _write(job, files, flags, partial, settings)
        manifest.write(partial)
        publish(partial, target)
    return manifest


def _write(
    job: Import, files: Sequence[_Ids], flags: NDArray[np.bool_] | None, partial: Path, settings: dict[str, Any]
) -> Manifest:
    tokenizer, name, size = job.tokenizer, job.folder.resolve().name, job.tokenizer.vocab_size
    train, held = (
        SplitWriter(partial, stem, dtype_of(size), size, job.shard_tokens) for stem in ("train", f"validation-{name}")
    )
    documents, last = 0, -1
    text_bytes = {writer: _TextBytes(tokenizer) for writer in (held, train)}
    for file in files:
        first = 0
        for part in file.parts():
            ids = _check_ids(part, first, size, file.file)
            first += len(ids)
            ends = np.flatnonzero(ids == tokenizer.end_of_text)
            # which documents a part has ids of, and whether each is held out
            held_out = np.ones(len(ends) + 1, bool) if flags is None else flags[documents : documents + len(ends) + 1]
            mask = np.repeat(held_out, np.diff(ends + 1, prepend=0, append=len(ids)))
            for writer, chosen in ((held, ids[mask]), (train, ids[~mask])):
                writer.add(chosen, int((chosen == tokenizer.end_of_text).sum()), text_bytes[writer].of(chosen))
            documents, last = documents + len(ends), int(ids[-1])
    _check(job, documents, last, train.documents, held.documents)
    return Manifest(
        name=name,
        source={"imported": [file.name for file in job.files]},
        settings=settings,
        dtype=dtype_of(size),
        vocab_size=size,
        tokenizer=tokenizer.fingerprint,
        train=train.finish(tokenizer.unknown),
        validation={name: held.finish(tokenizer.unknown)},
        left_out={},
    )


def _check(job: Import, documents: int, last: int, train: int, held: int) -> None:
    """Raise DataError where the documents are not ended, or a split has none."""
    end, where = job.tokenizer.end, job.files[-1]
    if last != end.id:
        what = f"the last id is {last}, not the end of text {end.token!r} (id {end.id}), with which a document ends"
        remedy = "Give all files of a set, in order; name another token with --end-of-text, or check --dtype."
        raise DataError(what, where, remedy)
    if not held or (job.held_out < 1 and not train):
        what = f"of {documents:,} documents, {train:,} are for training and {held:,} for validation"
        raise DataError(what, where, "Set another --held-out, or give more files.")


def _find_held_out(job: Import, files: Sequence[_Ids]) -> NDArray[np.bool_] | None:
    """Read all ids once, and return whether each document is held out, [documents + 1]; None: all are.

    A hash of its ids decides, so copies of a document are in the same split. Ids after the last end of text count as
    a document.
    """
    flags: list[bool] = []
    digest = document_digest()
    for file in files:
        for ids in file.parts():
            if job.held_out >= 1:
                continue
            *ended, rest = np.split(ids.astype("<i8"), np.flatnonzero(ids == job.tokenizer.end_of_text) + 1)
            for part in ended:
                digest.update(part.tobytes())
                flags.append(share_of(digest.digest()) < job.held_out)
                digest = document_digest()
            digest.update(rest.tobytes())
    return None if job.held_out >= 1 else np.array([*flags, False])


def _check_ids(ids: NDArray[np.integer], first: int, vocab_size: int, file: Path) -> NDArray[np.int64]:
    """Return the ids of a part. first: the position of its first id. Raises DataError for one beyond the vocabulary."""
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(bad):
        what = f"id {ids[bad[0]]} at position {first + bad[0]:,}, and the vocabulary has {vocab_size:,} tokens"
        raise DataError(what, file, "Check --dtype, and that --tokenizer is the one that made the ids.")
    return ids.astype(np.int64)
