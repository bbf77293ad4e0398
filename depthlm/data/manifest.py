"""The manifest of a folder of token files: what lies there and what it was made from."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from depthlm.data.errors import DataError
from depthlm.files import replace_text
from depthlm.locations import command

VERSION = 2
FILE_NAME = "manifest.json"
_PREPARE = command("data/prepare.py", "prepare")
_REMEDY = f"Remove the folder and prepare it again: {_PREPARE} with the same overrides."


@dataclass(frozen=True)
class Shard:
    """One file: its name in the folder, its tokens, and the sha256 of its bytes."""

    name: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """One split: its tokens (an end of text after each document included), documents, and UTF-8 bytes of text.

    unigram_entropy: of the split's distribution of tokens, in nats per token; null but for train.
    """

    tokens: int
    documents: int
    bytes: int
    files: tuple[Shard, ...]
    unigram_entropy: float | None = None


@dataclass(frozen=True)
class Manifest:
    """The record of a folder of token files; a folder is whole when it has one.

    name: the corpus. source: the text as it was found. settings: what the bytes were made from. dtype: uint16 or
    uint32, little-endian. vocab_size: ids are below it. tokenizer: the sha256 of tokenizer.json.
    validation: keyed by the name of the set. left_out: how many documents were, by the reason.
    """

    name: str
    source: dict[str, Any]
    settings: dict[str, Any]
    dtype: str
    vocab_size: int
    tokenizer: str
    train: Split
    validation: dict[str, Split]
    left_out: dict[str, int]
    version: int = VERSION

    @staticmethod
    def exists(folder: str | Path) -> bool:
        """Whether the folder has a manifest."""
        return Path(folder, FILE_NAME).is_file()

    @classmethod
    def read(cls, folder: str | Path) -> "Manifest":
        """The manifest of the folder. Raises DataError where there is none, or one of another version or kind."""
        file = Path(folder, FILE_NAME)
        if not file.is_file():
            raise DataError("no token files", folder, f"Prepare them: {_PREPARE} with the same overrides.")
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            if found["version"] != VERSION:
                raise DataError(f"token files of version {found['version']}, this is {VERSION}", file, _REMEDY)
            found["train"] = _split(found["train"])
            found["validation"] = {name: _split(split) for name, split in found["validation"].items()}
            if found["dtype"] not in ("uint16", "uint32") or not isinstance(found["vocab_size"], int):
                raise ValueError(f"dtype {found['dtype']!r}, vocab_size {found['vocab_size']!r}")
            return cls(**found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"not a manifest of token files ({error!r})", file, _REMEDY) from error

    def write(self, folder: str | Path) -> Path:
        """Write manifest.json into the folder; the file's path."""
        file = Path(folder, FILE_NAME)
        replace_text(file, json.dumps(asdict(self), indent=2) + "\n")
        return file

    def digest(self) -> str:
        """A digest of all tokens: the same for the same bytes, wherever they lie."""
        shards = [shard.sha256 for split in self.splits().values() for shard in split.files]
        return hashlib.sha256(" ".join(shards).encode()).hexdigest()

    def splits(self) -> dict[str, Split]:
        """All splits by the stem of their files: train, validation-<set>."""
        return {"train": self.train} | {f"validation-{name}": split for name, split in self.validation.items()}


def verify(folder: str | Path, show: Callable[[int], object] = lambda read: None) -> None:
    """Read every file and compare its digest with the manifest's. Raises DataError for the first that differs.

    show: called with the bytes of each file once it has been read.
    """
    manifest = Manifest.read(folder)
    expected = {"tokenizer.json": manifest.tokenizer}
    expected |= {shard.name: shard.sha256 for split in manifest.splits().values() for shard in split.files}
    for name, digest in expected.items():
        file = Path(folder, name)
        if not file.is_file():
            raise DataError("a token file is missing", file, _REMEDY)
        with open(file, "rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                raise DataError("not the bytes that the manifest lists", file, _REMEDY)
            show(stream.tell())


def check_sizes(folder: str | Path, manifest: Manifest) -> None:
    """Raise DataError for a token file that is missing or is not as long as the manifest says."""
    item_bytes = 2 if manifest.dtype == "uint16" else 4
    for split in manifest.splits().values():
        for shard in split.files:
            file = Path(folder, shard.name)
            if not file.is_file():
                raise DataError("a token file is missing", file, _REMEDY)
            size, whole = file.stat().st_size, shard.tokens * item_bytes
            if size != whole:
                raise DataError(f"a token file of {size} bytes where the manifest says {whole}", file, _REMEDY)


def _split(found: dict[str, Any]) -> Split:
    split = Split(**(found | {"files": tuple(Shard(**shard) for shard in found["files"])}))
    counts = [split.tokens, split.documents, split.bytes, *(shard.tokens for shard in split.files)]
    names = [shard.name for shard in split.files]
    if not all(isinstance(count, int) for count in counts) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"counts {counts}, files {names}")
    return split
