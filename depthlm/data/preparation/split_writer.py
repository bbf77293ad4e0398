"""The writer of one split as token files of equal length, which resumes after a kill."""

import hashlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from depthlm.data.errors import DataError
from depthlm.data.manifest import Shard, Split


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
            while chunk := self._file.read(2**24):
                self._digest.update(chunk)
            if self._digest.hexdigest() != state["open_sha256"]:
                remedy = "Check the disk, remove this folder by hand, and run the same command again."
                raise DataError(f"{self._name} is damaged: it differs from its SHA-256", self.folder, remedy)
            self._length = state["open"]

    def finish(self, unknown: int | None = None, entropy: bool = False) -> Split:
        """Close the last file and return the record of the split, with its unigram entropy if `entropy`.

        unknown: the id of the unknown token, if there is one.
        """
        self._close()
        nats = unigram_entropy(self.counts) if entropy else None
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


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy in nats of the distribution with these counts, [vocabulary]: the loss of a unigram model."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def dtype_of(vocab_size: int) -> str:
    """Return the dtype of the token files: uint16 where every id fits, else uint32."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def little_endian(dtype: str) -> np.dtype[Any]:
    """Return the little-endian dtype, as stored in the files."""
    return np.dtype(dtype).newbyteorder("<")
