"""One pass over a source that writes its token files; after a kill it resumes from the last complete shard."""

import re
from collections import Counter, deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from depthlm.data.corpora.documents import REASONS, Reader, digest_of, documents, held_out_share, is_validation
from depthlm.data.corpora.formats import TextFile
from depthlm.data.corpora.sources import TextFiles
from depthlm.data.manifest import Manifest, dtype_of, little_endian
from depthlm.data.preparation.progress import Position, ProgressBar, ProgressFile, SplitWriter
from depthlm.data.settings import Data, Source
from depthlm.data.token_files import quota, vocab_size
from depthlm.data.tokenizers import Tokenizer
from depthlm.errors import DataError
from depthlm.machine import environment

# Characters of a batch. Each core encodes another batch, which takes less processor time than all cores encoding one
# batch together. The library needs some hundred bytes of memory for each character.
BATCH = 2**18

# A document with more characters is cut and encoded in pieces.
LONGEST = 2**20

# Characters on either side of a cut that decide whether it changes the ids, and places that are tried per pattern.
CONTEXT, TRIES = 2**10, 64
# Where a document may be cut, best first: after a line end, before a space, before any character.
PLACES = [re.compile(pattern, re.DOTALL) for pattern in (r"\n(?=\S)", r"\S(?=\s)", r".(?=.)")]

# Remedies for bad documents, by the reason.
REMEDIES = {"field": "set data.text_field to the text's field", "long": "raise it, or divide the document"}

# Tokens after which the share of unknown tokens is checked while encoding.
MIN_CHECKED_TOKENS = 2**20

# Batches that are read before a core is free to encode them.
AHEAD = 2


@dataclass(frozen=True)
class Job:
    """What is prepared: a source and everything that determines its token files.

    folder: where the token files are prepared.
    """

    name: str
    source: Source
    data: Data
    files: TextFiles
    settings: dict[str, Any]
    tokenizer: Tokenizer
    folder: Path
    console: Console

    @property
    def validation_only(self) -> bool:
        """Whether all documents are held out."""
        return self.name in self.data.validation

    @cached_property
    def quota(self) -> int | None:
        """The number of training tokens after which to stop; None: all."""
        return None if self.validation_only else quota(self.name, self.data)

    @cached_property
    def vocab_size(self) -> int:
        """An upper bound of the ids; a tokenizer that is trained on little text may have fewer tokens."""
        return vocab_size(self.data)

    @cached_property
    def sections(self) -> list["Section"]:
        """The files of the source in the order in which they are read."""
        if self.validation_only:
            return [Section(self.files.train, 1.0)]
        held_out = [Section(self.files.held_out, 1.0)] if self.files.held_out else []
        return [*held_out, Section(self.files.train, held_out_fraction(self.files, self.source, self.data))]

    @cached_property
    def held_out_texts(self) -> frozenset[bytes]:
        """The digests of all documents in the files that are held out, which are not trained on."""
        texts = documents(self.files.held_out or (), *reading(self.source, self.data))
        return frozenset(digest_of(text) for _, text in texts)


class Piece(NamedTuple):
    """A document, a part of a document too long to be encoded at once, or (without text) a bad document.

    before: the last CONTEXT characters before a part.
    """

    held_out: bool
    text: str
    last: bool
    after: Position
    bad: str = ""
    before: str = ""


class Section(NamedTuple):
    """Files that are read in order, and the share of their documents that is held out."""

    files: list[TextFile]
    fraction: float


class Encoded(NamedTuple):
    """Pieces encoded at once, with the ids and the bytes of text of each. done: the share of the source read."""

    pieces: list[Piece]
    ids: list[NDArray[np.integer]]
    sizes: list[int]
    done: float


def encode(job: Job) -> Manifest:
    """Write the token files of both splits into the folder and return their manifest without writing it.

    Resumes from the folder's progress file where there is one. Each document is followed by the end-of-text token.
    Raises DataError where a document or file is bad, a split has no document, or too many tokens are unknown.
    """
    size, dtype = job.vocab_size, dtype_of(job.vocab_size)
    stems = {False: "train", True: f"validation-{job.name}"}
    writers = {held: SplitWriter(job.folder, stem, dtype, size, job.data.shard_tokens) for held, stem in stems.items()}
    skipped: Counter[str] = Counter()
    progress = ProgressFile(job.folder, job.settings, job.files, job.tokenizer.fingerprint)
    position = progress.restore(writers, skipped) or Position(0, 0, 0)
    saved = sum(len(writer.shards) for writer in writers.values())
    bar = ProgressBar(job.console, job.name, job.quota)
    with bar, closing(encoded_batches(job, position)) as batches:
        for batch in batches:
            full = _write(writers, skipped, batch, job)
            if sum(writer.tokens for writer in writers.values()) > MIN_CHECKED_TOKENS:
                _check_unknown(job, writers)
            bar.show(batch.done, writers)
            if full:
                break
            # a position lies between documents: a shard completed within a document is recorded at the document's end
            last = batch.pieces[-1]
            if last.last and (shards := sum(len(writer.shards) for writer in writers.values())) > saved:
                progress.save(last.after, writers, skipped)
                saved = shards
    train, validation = writers[False], writers[True]
    _check_splits(job, train.documents, validation.documents, skipped)
    _check_unknown(job, writers)
    return Manifest(
        name=job.name,
        source=job.files.description | ({"times": job.files.times} if job.files.times else {}),
        settings=job.settings,
        dtype=dtype,
        vocab_size=size,
        tokenizer=job.tokenizer.fingerprint,
        train=train.finish(job.tokenizer.unknown),
        validation={job.name: validation.finish(job.tokenizer.unknown)},
        left_out=dict(skipped),
    )


def encoded_batches(job: Job, position: Position) -> Generator[Encoded]:
    """Encode the source from a position on, some batches ahead of the one that is yielded."""
    dtype = little_endian(dtype_of(job.vocab_size))
    with ThreadPoolExecutor(environment.cores()) as pool:
        waiting: deque[Future[Encoded]] = deque()
        batches = _batches(job, position)
        try:
            while True:
                while len(waiting) < environment.cores() + AHEAD and (batch := next(batches, None)) is not None:
                    waiting.append(pool.submit(_encode, job.tokenizer, *batch, dtype))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def reading(source: Source, data: Data) -> tuple[str, bool, int]:
    """Return the text_field, cut and longest of the `Reader` of a source, in which a single file is cut."""
    is_cut = source.source is not None and Path(source.source).is_file()
    return source.text_field or "", is_cut, data.max_document_bytes


def held_out_fraction(files: TextFiles, source: Source, data: Data) -> float:
    """Return the share of documents to hold out: 0 with held-out files, else enough for at least one document."""
    if files.held_out is not None:
        return 0.0
    every_document = documents(files.train, *reading(source, data))
    return held_out_share((identity(name, text, data) for name, text in every_document), data.validation_fraction)


def identity(name: str, text: str, data: Data) -> str:
    """Return the text whose hash decides whether a document is held out."""
    return name if data.held_out_by == "name" else text


def cut(text: str, tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Yield (the end of what precedes it, part) for each part of a text, of at most 2 LONGEST characters.

    Together, the parts have the ids of the text, if places are found where a cut changes no ids within CONTEXT
    characters, and such a cut changes no ids farther away.
    """
    start = 0
    # what is left has enough places
    while len(text) - start > 2 * LONGEST:
        earliest = start + LONGEST
        places = (islice(place.finditer(text, earliest, earliest + LONGEST), TRIES) for place in PLACES)
        ends = (match.end() for match in chain.from_iterable(places))
        boundaries = (
            end for end in ends if tokenizer.is_boundary(text[max(0, end - CONTEXT) : end], text[end : end + CONTEXT])
        )
        end = next(boundaries, earliest)
        yield text[max(0, start - CONTEXT) : start], text[start:end]
        start = end
    yield text[max(0, start - CONTEXT) : start], text[start:]


def _batches(job: Job, start: Position) -> Iterator[tuple[list[Piece], float]]:
    """Yield the pieces that are encoded at once, and the share of the source that has been read."""
    total = sum(len(files) for files, _ in job.sections)
    batch: list[Piece] = []
    characters = 0
    for piece, files_read, reader in _pieces(job, start):
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH:
            yield batch, (files_read + reader.share_read) / total
            batch, characters = [], 0
    if batch:
        yield batch, 1.0


def _pieces(job: Job, start: Position) -> Iterator[tuple[Piece, int, Reader]]:
    """Yield each piece with the number of files fully read before it and the reader of its file."""
    files_read, limits = -1, reading(job.source, job.data)
    for section, (files, fraction) in enumerate(job.sections):
        for index, file in enumerate(files):
            files_read += 1
            if (section, index) < start[:2]:
                continue
            first_record = start.record if (section, index) == start[:2] else 0
            reader = Reader(file, *limits)
            for record in reader.records(first_record):
                after = Position(section, index, record.next)
                bad, text = record.bad, record.text or ""
                if bad not in ("", "empty") and job.data.on_bad_document == "error":
                    remedy = REMEDIES.get(bad, "fix the file")
                    remedy = f"Either {remedy}, or set data.on_bad_document=skip to skip and count such documents."
                    raise DataError(record.why, file.location, remedy)
                if not bad and files is not job.files.held_out and job.held_out_texts:
                    bad = "held_out" if digest_of(text) in job.held_out_texts else ""
                if bad:
                    yield Piece(False, "", True, after, bad), files_read, reader
                    continue
                held_out, end = is_validation(identity(record.name, text, job.data), fraction), len(text)
                for before, part in cut(text, job.tokenizer):
                    end -= len(part)
                    yield Piece(held_out, part, not end, after, before=before), files_read, reader


def _encode(tokenizer: Tokenizer, batch: list[Piece], done: float, dtype: np.dtype[Any]) -> Encoded:
    """Encode pieces. A bad one has no text; its ids, the end of text alone, are not written."""
    encoded = tokenizer.encode_batch([piece.text for piece in batch], [piece.before for piece in batch])
    ids = [
        np.array(part + piece.last * [tokenizer.end_of_text], dtype) for piece, part in zip(batch, encoded, strict=True)
    ]
    return Encoded(batch, ids, [len(piece.text.encode()) for piece in batch], done)


def _write(writers: dict[bool, SplitWriter], skipped: Counter[str], batch: Encoded, job: Job) -> bool:
    """Write the pieces up to the end of the document that fills the quota; return whether the quota is full.

    A quota does not count as full, however small it is, before a document has been held out.
    """
    ids: dict[bool, list[NDArray[np.integer]]] = {held: [] for held in writers}
    tokens, ended, text_bytes, full = Counter[bool](), Counter[bool](), Counter[bool](), False
    for piece, piece_ids, size in zip(batch.pieces, batch.ids, batch.sizes, strict=True):
        if piece.bad:
            skipped[piece.bad] += 1
            continue
        ids[piece.held_out].append(piece_ids)
        tokens[piece.held_out] += len(piece_ids)
        ended[piece.held_out] += piece.last
        text_bytes[piece.held_out] += size
        reached = job.quota is not None and writers[False].tokens + tokens[False] >= job.quota
        full = reached and piece.last and writers[True].documents + ended[True] > 0
        if full:
            break
    for held, parts in ids.items():
        if parts:
            writers[held].add(np.concatenate(parts), ended[held], text_bytes[held])
    return full


def _check_unknown(job: Job, writers: dict[bool, SplitWriter]) -> None:
    """Raise DataError if a larger share than data.max_unknown of the tokens so far is the unknown token."""
    tokens, unknown = sum(writer.tokens for writer in writers.values()), job.tokenizer.unknown
    if unknown is None or not tokens:
        return
    share = sum(int(writer.counts[unknown]) for writer in writers.values()) / tokens
    if share > job.data.max_unknown:
        what = f"{share:.1%} of {tokens:,} tokens stand for text that the tokenizer does not know"
        remedy = (
            "Set data.tokenizer to one for this text (bpe and bytes know any), or accept the loss with "
            f"data.max_unknown={min(1.0, round(share + 0.01, 2))}."
        )
        raise DataError(what, job.name, remedy)


def _check_splits(job: Job, train: int, validation: int, skipped: Counter[str]) -> None:
    if not validation or not (train or job.validation_only):
        where = job.files.description.get("root") or job.files.description.get("hub")
        reasons = "".join(f"; skipped {count} {REASONS[reason]}" for reason, count in skipped.items())
        what = f"{train} documents for training and {validation} for validation{reasons}"
        remedy = "Give more documents with other text: a folder of many files, or one file, which is cut into many."
        if not train and not validation:
            remedy = "Set data.source to a folder or file of text, and data.text_field to the column of the text."
        raise DataError(what, where, remedy)
