"""Reading token files, and the corpus of a configuration, which consists of them."""

import hashlib
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from depthlm.data.corpora.sources import train_sources, validation_sources
from depthlm.data.errors import DataError
from depthlm.data.manifest import VERIFY, Manifest, Shard, check_sizes
from depthlm.data.preparation.split_writer import little_endian
from depthlm.data.settings import Data
from depthlm.data.token_folder import check_settings, quota, token_folder
from depthlm.data.tokenizers import Tokenizer

# Limit of open files: a corpus may have thousands of shards, and the number of file descriptors is limited.
OPEN_FILES = 256


class TokenFiles:
    """One split as a single sequence of tokens across its files, limited to the first `limit` tokens where given.

    Files are read by position, not memory-mapped: so what was read does not stay in the process's memory, and a
    truncated file raises an error instead of killing the process. Each process opens the files at its first read, so
    the object can be sent to a worker.
    """

    def __init__(
        self,
        folder: str | Path,
        shards: Sequence[Shard],
        dtype: str,
        limit: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """vocab_size: that of the tokenizer; all ids must be below it. None: any id is valid."""
        self.folder, self.shards, self.dtype = Path(folder), tuple(shards), little_endian(dtype)
        self.vocab_size = vocab_size
        self._ends = list(accumulate(shard.tokens for shard in shards))
        self._length = min(self._ends[-1] if self._ends else 0, limit if limit is not None else 2**63)

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Return tokens start to start + count, [count].

        Raises IndexError where they do not all exist, DataError where a file has become shorter or has an invalid id.
        """
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens {start} to {start + count} of {len(self)} in {self.folder}")
        tokens = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            index = bisect_right(self._ends, start + filled)
            shard = self.shards[index]
            offset = start + filled - (self._ends[index] - shard.tokens)
            length, size = min(count - filled, shard.tokens - offset), self.dtype.itemsize
            content = os.pread(self._open(shard.name).fileno(), length * size, offset * size)
            if len(content) != length * size:
                raise DataError("a token file has become shorter", self.folder / shard.name, "Restore the file.")
            part = np.frombuffer(content, dtype=self.dtype)
            if self.vocab_size is not None and part.max() >= self.vocab_size:
                what = f"a token file has the id {part.max()}, and the vocabulary has {self.vocab_size} tokens"
                raise DataError(what, self.folder / shard.name, VERIFY)
            tokens[filled : filled + len(part)] = part
            filled += len(part)
        return tokens

    @cached_property
    def _open(self) -> Callable[[str], BinaryIO]:
        return lru_cache(maxsize=OPEN_FILES)(lambda name: open(self.folder / name, "rb", buffering=0))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_open"}


@dataclass(frozen=True)
class Corpus:
    """Open token files. train, manifests, weights: by source; validation: by the name of the set."""

    name: str
    folders: dict[str, Path]
    manifests: dict[str, Manifest]
    tokenizer: Tokenizer
    train: dict[str, TokenFiles]
    weights: dict[str, float]
    validation: dict[str, TokenFiles]

    @property
    def tokens(self) -> int:
        """Number of training tokens of all sources."""
        return sum(len(tokens) for tokens in self.train.values())

    def windows(self, sequence_length: int) -> int:
        """Return the number of training sequences of this length, each with its targets."""
        return sum((len(tokens) - 1) // sequence_length for tokens in self.train.values())

    @property
    def unigram_entropy(self) -> float | None:
        """Entropy of the training tokens in nats per token; null for a mixture, whose counts depend on the run."""
        return next(iter(self.manifests.values())).train.unigram_entropy if len(self.train) == 1 else None

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per training token."""
        splits = [self.manifests[name].train for name in self.train]
        return sum(split.bytes for split in splits) / max(1, sum(split.tokens for split in splits))

    def digest(self) -> str:
        """Return a digest of all sources' tokens: the same for the same bytes, wherever they are stored."""
        digests = [self.manifests[name].digest() for name in self.train]
        return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def open_corpus(data: Data) -> Corpus:
    """Open the prepared token files of this configuration.

    `train` has each source's share of data.max_tokens, and of those the first data.fraction.
    Raises DataError where token files are missing or differ from their manifest, or the sources' tokenizers differ.
    """
    sources, validation_sets = train_sources(data), validation_sources(data)
    if shared := sorted(sources.keys() & validation_sets.keys()):
        raise DataError("a validation set has the name of a source", ", ".join(shared), "Rename it in data.validation.")
    folders, manifests, train, validation = {}, {}, {}, {}
    tokenizers: dict[tuple[str, int], Tokenizer] = {}
    for name, source in (sources | validation_sets).items():
        folder = folders[name] = token_folder(name, source, data)
        manifest = manifests[name] = Manifest.read(folder)
        check_settings(name, source, data, manifest)
        check_sizes(folder, manifest)
        tokenizer = Tokenizer.load(folder)
        if tokenizer.fingerprint != manifest.tokenizer:
            remedy = "Remove the folder and prepare it again: the ids would decode to different text."
            raise DataError("tokenizer.json is not the one the tokens were made with", folder, remedy)
        tokenizers[tokenizer.fingerprint, tokenizer.end_of_text] = tokenizer
        if len(tokenizers) > 1:
            remedy = "Prepare all sources and validation sets with one data.tokenizer and one data.end_of_text."
            raise DataError(
                "token files made with another tokenizer or end of text than those of the first source", folder, remedy
            )
        if name in sources:
            limit = quota(name, data)
            tokens = manifest.train.tokens if limit is None else min(limit, manifest.train.tokens)
            limit = math.ceil(data.fraction * tokens)
            train[name] = TokenFiles(folder, manifest.train.files, manifest.dtype, limit, manifest.vocab_size)
        # a folder holds one validation set; at a given path it may have been prepared under another name
        (held_out,) = manifest.validation.values()
        validation[name] = TokenFiles(folder, held_out.files, manifest.dtype, vocab_size=manifest.vocab_size)
    weights = {name: source.weight or 1.0 for name, source in sources.items()}
    return Corpus(data.name, folders, manifests, tokenizers.popitem()[1], train, weights, validation)
