"""One pass over a corpus: documents in, token files and their manifest out."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from depthlm.data.corpora import describe, documents, held_out_share, is_validation, pieces
from depthlm.data.errors import DataError
from depthlm.data.manifest import Manifest
from depthlm.data.settings import settings
from depthlm.data.token_files import SplitWriter, dtype_of
from depthlm.data.tokenizers import Tokenizer, bytes_tokenizer, sample, train_bpe, vocab_size

if TYPE_CHECKING:
    from depthlm.config.schema import Data

# Characters that are encoded at once: the library needs some hundred bytes of memory for each.
BATCH = 2**21

# Characters of the longest piece of a document that is encoded as a whole; the tokens at a cut depend on it.
LONGEST = 2**20


class Piece(NamedTuple):
    """A document, or a part of one too long to be encoded at once."""

    held_out: bool
    text: str
    last: bool


def encode_corpus(data: "Data", folder: Path, console: Console) -> Manifest:
    """Write the tokenizer and the files of both splits into the folder; their manifest, not yet written.

    Each document is followed by the end of text. Raises DataError where a split has no document.
    """
    source, size, fraction = describe(data), vocab_size(data), held_out_share(data)
    with _parallel_tokenizers(), _bar(console, source["bytes"]) as show:
        tokenizer = _tokenizer(data, source["bytes"], fraction)
        tokenizer.save(folder)
        train = SplitWriter(folder, "train", dtype_of(size), size)
        validation = SplitWriter(folder, f"validation-{data.name}", dtype_of(size), size)
        for batch in _batches(data, fraction):
            for writer, held_out in ((train, False), (validation, True)):
                _write(writer, tokenizer, [piece for piece in batch if piece.held_out == held_out])
            show(train.bytes + validation.bytes, train.tokens + validation.tokens)
    manifest = Manifest(
        name=data.name,
        source=source,
        settings=settings(data),
        dtype=dtype_of(size),
        vocab_size=size,
        tokenizer=tokenizer.fingerprint,
        train=train.finish(entropy=True),
        validation={data.name: validation.finish()},
    )
    if not train.documents or not validation.documents:
        raise _one_sided(data, train.documents, validation.documents)
    left_out = source["files"] - train.documents - validation.documents
    if data.source and left_out > 0:
        console.print(f"left out {left_out} files that are empty or not UTF-8")
    return manifest


def _write(writer: SplitWriter, tokenizer: Tokenizer, batch: list[Piece]) -> None:
    if not batch:
        return
    ids: list[np.ndarray] = []
    for piece, encoded in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
        ids += [encoded, np.array([tokenizer.end_of_text])] if piece.last else [encoded]
    ended = sum(piece.last for piece in batch)
    writer.add(np.concatenate(ids), ended, sum(len(piece.text.encode()) for piece in batch))


def _batches(data: "Data", fraction: float) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for name, text in documents(data):
        held_out = is_validation(name, fraction)
        parts = [text] if len(text) <= LONGEST else list(pieces(io.StringIO(text, newline=""), LONGEST))
        for number, part in enumerate(parts, 1):
            batch.append(Piece(held_out, part, last=number == len(parts)))
            characters += len(part)
            if characters >= BATCH:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _tokenizer(data: "Data", total_bytes: int, fraction: float) -> Tokenizer:
    if data.tokenizer == "bytes":
        return bytes_tokenizer()
    if data.tokenizer != "bpe":
        return Tokenizer.load(data.tokenizer)
    train = ((name, text) for name, text in documents(data) if not is_validation(name, fraction))
    return train_bpe(sample(train, total_bytes), data.vocab_size)


def _one_sided(data: "Data", train: int, validation: int) -> DataError:
    where = data.source or data.name
    if not train and not validation:
        return DataError("every file is empty or not UTF-8", where, "Set data.source to a folder or file of text.")
    what = f"{train} documents for training and {validation} for validation"
    return DataError(what, where, "Give more documents: a folder of many files, or one file, which is cut into many.")


@contextmanager
def _parallel_tokenizers() -> Iterator[None]:
    # The library reads this variable at each call, and keeps quiet at a later fork where it is set at all.
    before = os.environ["TOKENIZERS_PARALLELISM"]
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = before


@contextmanager
def _bar(console: Console, total_bytes: int) -> Iterator[Callable[[int, int], None]]:
    columns = (
        TextColumn("tokenising"),
        BarColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=console.quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=total_bytes, tokens=0)
        yield lambda done, tokens: bar.update(task, completed=done, tokens=tokens)
