"""Token files made from files of token ids that were tokenized elsewhere, such as published validation sets."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from depthlm.console import stderr_console
from depthlm.data.corpora.documents import is_validation
from depthlm.data.manifest import VERSION, Manifest, dtype_of, little_endian
from depthlm.data.preparation import progress as progress_file
from depthlm.data.preparation.prepare import check_name, locked, publish
from depthlm.data.preparation.progress import SplitWriter
from depthlm.data.settings import SHARD_TOKENS
from depthlm.data.tokenizers import REMEDY, Tokenizer, bytes_tokenizer, check_end_of_text, pretrained_tokenizer
from depthlm.errors import DataError
from depthlm.files import sync

DTYPES = ("uint16", "uint32", "uint64", "int32", "int64")
# ids in memory at a time
CHUNK = 2**22
# the first bytes of a .npy file with a header; many files of this name have none
NPY = b"\x93NUMPY"


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


@dataclass(frozen=True)
class Import:
    """Files of ids, which follow one another as one sequence of documents, and the folder of token files to make.

    dtype: of the ids in files without a header, little-endian. held_out: the share of the documents in the validation
    set, chosen by a hash of their numbers; 1: all, as in a validation set.
    """

    files: Sequence[Path]
    dtype: str | None
    tokenizer: Tokenizer
    folder: Path
    held_out: float = 1.0
    shard_tokens: int = SHARD_TOKENS


def load_tokenizer(name: str, end_of_text: str | None) -> Tokenizer:
    """Return the tokenizer of imported ids: `bytes`, a tokenizer.json or one of the hub. Raises DataError."""
    if name == "bpe":
        raise DataError("ids need the tokenizer that made them", "--tokenizer=bpe", REMEDY.replace("`bpe`, ", ""))
    if name == "bytes":
        check_end_of_text("--tokenizer=bytes", "--end-of-text", end_of_text)
        return bytes_tokenizer()
    return pretrained_tokenizer(name, end_of_text)


def import_tokens(job: Import, console: Console | None = None) -> Manifest:
    """Make the token files, and return their manifest. A folder that already has this content stays.

    Raises DataError where a file cannot be read, has another dtype or an id beyond the vocabulary, the last document
    has no end of text, or a split would have no document.
    """
    console = console or stderr_console()
    target = job.folder.resolve()
    check_name(target.name)
    arrays = [_open(file, job.dtype) for file in job.files]
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target, console):
        settings = {
            "version": VERSION,
            "imported": [
                [str(file.resolve()), _digest(array), str(array.dtype)]
                for file, array in zip(job.files, arrays, strict=True)
            ],
            "tokenizer": job.tokenizer.fingerprint,
            "end_of_text": job.tokenizer.end.token,
            "validation_fraction": job.held_out,
        }
        if Manifest.exists(target):
            manifest = Manifest.read(target)
            if manifest.settings != settings:
                raise DataError("the folder has other token files", job.folder, "Set another --to, or remove it.")
            return manifest
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise DataError("token files need an empty folder", job.folder, "Empty it, or set another --to.")
        partial = target.with_name(f"{target.name}.partial")
        progress_file.check_mark(partial, settings)
        if partial.exists():
            progress_file.clear(partial)
        partial.mkdir(exist_ok=True)
        progress_file.mark(partial, settings)
        sync(job.tokenizer.save(partial))
        manifest = _write(job, arrays, partial, settings)
        manifest.write(partial)
        publish(partial, target)
    return manifest


def _write(job: Import, arrays: Sequence[NDArray[np.integer]], partial: Path, settings: dict[str, Any]) -> Manifest:
    tokenizer, name, size = job.tokenizer, job.folder.resolve().name, job.tokenizer.vocab_size
    train, held = (
        SplitWriter(partial, stem, dtype_of(size), size, job.shard_tokens) for stem in ("train", f"validation-{name}")
    )
    documents, is_held, last = 0, is_validation("0", job.held_out), -1
    text_bytes = {writer: _TextBytes(tokenizer) for writer in (held, train)}
    for file, array in zip(job.files, arrays, strict=True):
        for ids in _chunks(file, array, size):
            ends = np.flatnonzero(ids == tokenizer.end_of_text)
            # which documents a chunk has parts of, and whether each is held out
            flags = [
                is_held,
                *(is_validation(str(documents + number), job.held_out) for number in range(1, len(ends) + 1)),
            ]
            mask = np.repeat(flags, np.diff(ends + 1, prepend=0, append=len(ids)))
            for writer, part in ((held, ids[mask]), (train, ids[~mask])):
                writer.add(part, int((part == tokenizer.end_of_text).sum()), text_bytes[writer].of(part))
            documents, is_held, last = documents + len(ends), flags[-1], int(ids[-1])
    _check(job, documents, last, train.documents, held.documents)
    return Manifest(
        name=name,
        source={"imported": [file.name for file in job.files]},
        settings=settings,
        dtype=dtype_of(size),
        vocab_size=size,
        tokenizer=tokenizer.fingerprint,
        train=train.finish(tokenizer.unknown, entropy=bool(train.tokens)),
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


def _open(file: Path, dtype: str | None) -> NDArray[np.integer]:
    """Return the ids of a file, [n], which stay on the disk. Raises DataError where they cannot be read."""
    try:
        with file.open("rb") as stream:
            has_header = stream.read(len(NPY)) == NPY
        size = file.stat().st_size
        array: NDArray[Any] | None = np.load(file, mmap_mode="r") if has_header else None
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read ids ({error})", file, "Give a flat array of ids, with or without a header."
        ) from None
    if array is not None:
        if array.ndim != 1 or str(array.dtype) not in DTYPES or dtype not in (None, str(array.dtype)):
            what = f"an array of {array.ndim} dimensions and dtype {array.dtype}"
            raise DataError(what, file, f"Give ids [n] of {dtype or ' or '.join(DTYPES)}.")
        ids = array
    elif dtype is None:
        raise DataError("the file has no header that says the dtype of its ids", file, "Set --dtype, such as uint32.")
    else:
        width = little_endian(dtype).itemsize
        if size % width:
            raise DataError(f"{size} bytes are no whole number of ids of {width} bytes", file, "Check --dtype.")
        ids = np.memmap(file, dtype=little_endian(dtype), mode="r") if size else np.empty(0, little_endian(dtype))
    if not len(ids):
        raise DataError("no ids", file, "Leave this file out.")
    return ids


def _chunks(file: Path, array: NDArray[np.integer], vocab_size: int) -> Iterator[NDArray[np.int64]]:
    """Yield the ids of a file in parts. Raises DataError for an id outside of the vocabulary."""
    for start in range(0, len(array), CHUNK):
        ids = array[start : start + CHUNK]
        bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if len(bad):
            what = f"id {ids[bad[0]]} at position {start + bad[0]:,}, and the vocabulary has {vocab_size:,} tokens"
            raise DataError(what, file, "Check --dtype, and that --tokenizer is the one that made the ids.")
        yield ids.astype(np.int64)


def _digest(array: NDArray[np.integer]) -> str:
    """Return the SHA-256 of the ids as they are stored."""
    digest = hashlib.sha256()
    for start in range(0, len(array), CHUNK):
        digest.update(np.ascontiguousarray(array[start : start + CHUNK]).tobytes())
    return digest.hexdigest()
