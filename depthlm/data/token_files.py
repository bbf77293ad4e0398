"""Token files: written once in shards, then read from anywhere through the page cache."""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from depthlm.data.errors import DataError
from depthlm.data.manifest import Manifest, Shard, Split, check_sizes
from depthlm.data.settings import check_settings, token_folder
from depthlm.data.tokenizers import Tokenizer

if TYPE_CHECKING:
    from depthlm.config.schema import Data

# Tokens of one file at most.
SHARD_TOKENS = 2**27


class SplitWriter:
    """Writes one split as <stem>-00000.bin, <stem>-00001.bin, ... of shard_tokens tokens each, the last shorter."""

    def __init__(self, folder: Path, stem: str, dtype: str, vocab_size: int, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self.stem, self.dtype, self.shard_tokens = folder, stem, _little_endian(dtype), shard_tokens
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.documents = self.bytes = self.tokens = 0
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None

    def add(self, ids: NDArray[np.integer], documents: int, text_bytes: int) -> None:
        """Append tokens, ids[n], that end so many documents and stand for so many bytes of text."""
        self.tokens += len(ids)
        self.documents += documents
        self.bytes += text_bytes
        self.counts += np.bincount(ids, minlength=len(self.counts))
        encoded = np.asarray(ids, dtype=self.dtype)
        while len(encoded):
            if self._file is None:
                self._name = f"{self.stem}-{len(self._shards):05d}.bin"
                self._file = open(self.folder / self._name, "wb")  # noqa: SIM115 -- `_close` does
                self._digest, self._length = hashlib.sha256(), 0
            part, encoded = np.split(encoded, [self.shard_tokens - self._length])
            self._file.write(part.tobytes())
            self._digest.update(part.tobytes())
            self._length += len(part)
            if self._length == self.shard_tokens:
                self._close()

    def finish(self, entropy: bool = False) -> Split:
        """Close the last file; the record of the split, with its unigram entropy if asked for."""
        self._close()
        nats = unigram_entropy(self.counts) if entropy else None
        return Split(self.tokens, self.documents, self.bytes, tuple(self._shards), nats)

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._shards.append(Shard(self._name, self._length, self._digest.hexdigest()))
            self._file = None


class TokenFiles:
    """One split as a sequence of tokens, memory-mapped across its files; the first `limit` tokens where given.

    Files are opened at the first read, in each process anew, so the object can be sent to a worker.
    """

    def __init__(self, folder: str | Path, shards: Sequence[Shard], dtype: str, limit: int | None = None) -> None:
        self.folder, self.shards, self.dtype = Path(folder), tuple(shards), dtype
        self._ends = list(accumulate(shard.tokens for shard in shards))
        self._length = min(self._ends[-1] if self._ends else 0, limit if limit is not None else 2**63)

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens start to start + count, [count]. Raises IndexError where they do not all exist."""
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens {start} to {start + count} of {len(self)} in {self.folder}")
        tokens = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            index = bisect_right(self._ends, start + filled)
            offset = start + filled - (self._ends[index] - self.shards[index].tokens)
            part = self._maps[index][offset : offset + count - filled]
            tokens[filled : filled + len(part)] = part
            filled += len(part)
        return tokens

    @cached_property
    def _maps(self) -> list[NDArray[Any]]:
        return [
            np.memmap(self.folder / s.name, _little_endian(self.dtype), "r", shape=(s.tokens,)) for s in self.shards
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_maps"}


@dataclass(frozen=True)
class Corpus:
    """An open folder of token files; validation is keyed by the name of the set."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer
    train: TokenFiles
    validation: dict[str, TokenFiles]


def open_corpus(data: "Data") -> Corpus:
    """Open the prepared token files of this configuration, `train` cut after data.max_tokens.

    Raises DataError where there are none, or they are not what their manifest says.
    """
    folder = token_folder(data)
    manifest = Manifest.read(folder)
    check_settings(data, manifest)
    check_sizes(folder, manifest, _little_endian(manifest.dtype).itemsize)
    tokenizer = Tokenizer.load(folder)
    if tokenizer.fingerprint != manifest.tokenizer:
        remedy = "Remove the folder and prepare it again: ids would mean other text."
        raise DataError("tokenizer.json is not the one the tokens were made with", folder, remedy)
    train = TokenFiles(folder, manifest.train.files, manifest.dtype, data.max_tokens)
    sets = {name: TokenFiles(folder, split.files, manifest.dtype) for name, split in manifest.validation.items()}
    return Corpus(folder, manifest, tokenizer, train, sets)


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """Entropy in nats of the distribution with these counts, [vocabulary]: the loss of knowing frequencies alone."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def dtype_of(vocab_size: int) -> str:
    """The type of the files: uint16 where every id fits, else uint32."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def _little_endian(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")
