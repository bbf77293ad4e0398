"""Token files, the corpus to train on, the settings that determine the bytes of a folder, and its name."""

import hashlib
import json
import math
import os
import platform
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from depthlm.data.corpora.documents import PIECE, PIECES
from depthlm.data.corpora.sources import all_sources, is_remote, train_sources, validation_sources
from depthlm.data.manifest import VERIFY, VERSION, Manifest, Shard, check_sizes, little_endian
from depthlm.data.settings import Data, Source
from depthlm.data.tokenizers import REMEDY, TOKENIZER_CONFIG, Tokenizer, is_on_hub, read_files, sample_bytes
from depthlm.errors import DataError
from depthlm.files import digest

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

    def validation_texts(self, max_tokens: int | None) -> dict[str, str]:
        """Return a name of the first max_tokens tokens (None: of all) of each validation set, by the set's name."""
        return {
            name: next(iter(self.manifests[name].validation.values())).first_tokens(min(max_tokens or size, size))
            for name, tokens in self.validation.items()
            if (size := len(tokens))
        }

    def digest(self) -> str:
        """Return a digest of all sources' tokens: the same for the same bytes, wherever they are stored."""
        digests = [self.manifests[name].digest() for name in self.train]
        return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def open_corpus(data: Data, run_tokenizer: Tokenizer | None = None) -> Corpus:
    """Open the prepared token files of this configuration.

    `train` has each source's share of data.max_tokens, and of those the first data.fraction. run_tokenizer: that of a
    run, with which they must have been made.
    Raises DataError where token files are missing or differ from their manifest, or the tokenizers differ.
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
        if manifest.settings.get("end_of_text", tokenizer.end.token) != tokenizer.end.token:
            what = f"the tokens were made with the end of text {manifest.settings['end_of_text']!r}"
            raise DataError(what, folder, f"Restore its {TOKENIZER_CONFIG}, or prepare the tokens again.")
        if run_tokenizer is not None:
            check_same_ids(run_tokenizer, tokenizer, folder, "Prepare the text of the run again, or give other text.")
        tokenizers[tokenizer.fingerprint, tokenizer.end_of_text] = tokenizer
        if len(tokenizers) > 1:
            raise _other_tokenizer(folder, "those of the first source")
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


def _is_file(source: Source) -> bool:
    """Return whether the text is a single file. Its name says so once it is gone, since its tokens outlive it."""
    path, suffixes = Path(source.source or ""), tuple(map(str.lower, source.suffixes or ()))
    return path.is_file() or (not path.is_dir() and path.name.lower().endswith(suffixes))


def check_tokenizer(tokenizer: Tokenizer, data: Data) -> None:
    """Raise DataError if a source has token files already, made with another tokenizer than those to be prepared."""
    for folder in token_folders(data).values():
        if Manifest.exists(folder) and Manifest.read(folder).tokenizer != tokenizer.fingerprint:
            raise _other_tokenizer(folder, "those that are prepared now")


def check_same_ids(run: Tokenizer, other: Tokenizer, folder: Path, remedy: str) -> None:
    """Raise DataError if the tokens of a folder have another tokenizer, or end of text, than a run."""
    if (run.fingerprint, run.end_of_text) != (other.fingerprint, other.end_of_text):
        raise DataError("prepared with another tokenizer than the run's: its ids mean other text", folder, remedy)


def _other_tokenizer(folder: Path, others: str) -> DataError:
    what = f"token files made with another tokenizer or end of text than {others}"
    remedy = "Prepare all sources and validation sets with one data.tokenizer and one data.end_of_text."
    return DataError(what, folder, remedy)


def settings(name: str, source: Source, data: Data) -> dict[str, Any]:
    """Return everything that determines the bytes of a source's token files, except the text.

    Raises DataError for a tokenizer that cannot be read.
    """
    result: dict[str, Any] = {"version": VERSION} | _text(name, source) | _tokenizer(data)
    if name in data.validation:
        result |= {"held_out": "all"}
    else:
        # patterns choose among the files of a folder; of a single file, a share is held out in any case
        if _is_file(source) or (source.validation_split if is_remote(source) else source.validation_files) is None:
            result["validation_fraction"] = data.validation_fraction
            result |= {"held_out_by": "name"} if data.held_out_by == "name" else {}
        if data.max_tokens is not None:
            result["max_tokens"] = quota(name, data)
    return result | {"shard_tokens": data.shard_tokens}


def quota(name: str, data: Data) -> int | None:
    """Return the number of training tokens to prepare: the source's share of data.max_tokens, rounded up; null: all."""
    if data.max_tokens is None:
        return None
    weights = {source: (entry.weight or 1.0) for source, entry in train_sources(data).items()}
    return math.ceil(data.max_tokens * weights[name] / sum(weights.values()))


def token_folder(name: str, source: Source, data: Data) -> Path:
    """Return the source's own path, or data/tokens/<name>-<digest of the settings> in the current folder.

    Token files with this digest are used under any name, so a renamed corpus is not prepared again.
    """
    if source.path:
        return Path(source.path)
    settings_json = json.dumps(settings(name, source, data), sort_keys=True)
    suffix = f"-{hashlib.sha256(settings_json.encode()).hexdigest()[:8]}"
    folder = Path("data", "tokens", f"{name}{suffix}")
    if Manifest.exists(folder):
        return folder
    complete = sorted(other for other in folder.parent.glob(f"*{suffix}") if Manifest.exists(other))
    return complete[0] if complete else folder


def token_folders(data: Data) -> dict[str, Path]:
    """Return the folder of token files of every source, then of every additional validation set."""
    return {name: token_folder(name, source, data) for name, source in all_sources(data).items()}


def vocab_size(data: Data) -> int:
    """Return the number of tokens, without preparing anything; for `bpe` it is an upper bound.

    Existing token files at data.path determine it. For a tokenizer on the hub, it is data.vocab_size, which preparing
    checks. Raises DataError for a tokenizer that cannot be read.
    """
    folder = next(iter(train_sources(data).values())).path
    if folder and Manifest.exists(folder):
        return Manifest.read(folder).vocab_size
    if data.tokenizer == "bytes":
        return 258
    if data.tokenizer == "bpe" or is_on_hub(data.tokenizer):
        return data.vocab_size
    return Tokenizer.load(data.tokenizer, data.end_of_text).vocab_size


def padded_vocab_size(data: Data) -> int:
    """Return `vocab_size`, rounded up to a multiple of data.pad_vocab_multiple."""
    multiple = data.pad_vocab_multiple
    return -(-vocab_size(data) // multiple) * multiple


def check_settings(name: str, source: Source, data: Data, manifest: Manifest) -> None:
    """Raise DataError where a source has a path and text, and the tokens there have other settings than requested.

    With a path alone, the tokens there are used as they are. There may be more of them than data.max_tokens.
    """
    if source.path is None or (source.source is None and source.hub is None):
        return
    wanted, prepared = settings(name, source, data), manifest.settings
    wanted_tokens, prepared_tokens = wanted.get("max_tokens"), prepared.get("max_tokens")
    if prepared_tokens is not None and (wanted_tokens is None or wanted_tokens > prepared_tokens):
        remedy = f"Set data.max_tokens to that number, set another path, or remove {source.path} to prepare more."
        what = f"only the first {prepared_tokens:,} tokens were prepared, and more are requested"
        raise DataError(what, source.path, remedy)
    # these may differ: fewer tokens are read, and files of any length
    free = {"max_tokens", "shard_tokens"}
    if source.validation_files is not None:
        # depthlm 0.2 did not record these of a single file beside patterns
        free |= {"validation_fraction", "held_out_by"} - prepared.keys()
    if differing := differences(*({k: v for k, v in each.items() if k not in free} for each in (prepared, wanted))):
        remedy = "Set another path, or data.source=null data.hub=null to train on these tokens as they are."
        raise DataError(f"token files made with other settings ({differing})", source.path, remedy)


def differences(prepared: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Return the settings that differ with both values, as words; empty if there are none."""
    differing = [key for key in sorted({*wanted, *prepared}) if wanted.get(key) != prepared.get(key)]
    return ", ".join(f"{key}: prepared {prepared.get(key)}, requested {wanted.get(key)}" for key in differing)


def _text(name: str, source: Source) -> dict[str, Any]:
    if is_remote(source):
        keys = ("hub", "subset", "revision", "split", "validation_split", "text_field")
        return {key: getattr(source, key) for key in keys}
    patterns = {"files": source.files, "validation_files": source.validation_files}
    if source.source is None:
        given = {key: pattern for key, pattern in patterns.items() if pattern is not None}
        return {"corpus": name, "python": platform.python_version()} | given
    # independent of whether the text still exists: its tokens outlive it
    text = {"text_field": source.text_field} | patterns
    root = str(Path(source.source).resolve())
    return text | {"source": root, "piece": [PIECE, PIECES], "suffixes": sorted(source.suffixes or ())}


def _tokenizer(data: Data) -> dict[str, Any]:
    name = data.tokenizer
    if name == "bytes":
        return {"tokenizer": name}
    if name != "bpe":
        if is_on_hub(name):
            return {"tokenizer": name} | ({} if data.end_of_text is None else {"end_of_text": data.end_of_text})
        try:
            tokenizer_digest = digest(Path(name))
        except OSError as error:
            raise DataError(f"cannot read a tokenizer ({error.strerror})", name, REMEDY) from error
        files = read_files(Path(name).parent)
        end = _unusual_end(name, tokenizer_digest, data.end_of_text, repr(files)) if files or data.end_of_text else {}
        return {"tokenizer": tokenizer_digest} | end
    result: dict[str, Any] = {"tokenizer": "bpe", "vocab_size": data.vocab_size}
    result["trained_on_bytes"] = sample_bytes(data.vocab_size)
    if data.sources or data.validation:
        # the tokenizer is trained on the text of every source, and shared by the additional validation sets
        texts = [_text(source_name, source) for source_name, source in train_sources(data).items()]
        result["trained_on"] = [*texts, data.validation_fraction, *(["name"] if data.held_out_by == "name" else [])]
    return result


@lru_cache
def _unusual_end(tokenizer: str, tokenizer_digest: str, end_of_text: str | None, files: str) -> dict[str, str]:
    """Return the end of text where it is not the one that tokenizer.json alone gives.

    tokenizer_digest, files: the content of the tokenizer and of the files beside it, on which the result depends.
    """
    loaded = Tokenizer.load(tokenizer, end_of_text)
    return {"end_of_text": loaded.end.token} if loaded.has_unusual_end else {}
