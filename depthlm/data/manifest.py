"""The manifest of a folder of token files: what it contains and what it was made from."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from depthlm.data.errors import DataError
from depthlm.files import digest, replace_text
from depthlm.locations import command

VERSION = 2
# A larger share of unknown tokens is worth a warning, and makes bits per byte meaningless: a token that stands for any
# text is cheap to predict.
UNKNOWN_SHARE = 0.001
FILE_NAME = "manifest.json"
_PREPARE = command("data/prepare.py", "prepare")
VERIFY = (
    f"Find the damaged files: {_PREPARE} --verify with the same overrides. Then remove the folder and prepare it again."
)
_REMEDY = f"Remove the folder and prepare it again: {_PREPARE} with the same overrides."


@dataclass(frozen=True)
class Shard:
    """One file: its name in the folder, its number of tokens, and the sha256 of its bytes."""

    name: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """One split: the numbers of its tokens (with an end of text after each document), documents and UTF-8 bytes.

    unigram_entropy: of the split's distribution of tokens, in nats per token; null except for train. unknown: the
    number of unknown tokens.
    """

    tokens: int
    documents: int
    bytes: int
    files: tuple[Shard, ...]
    unigram_entropy: float | None = None
    unknown: int = 0

    @property
    def hides_text(self) -> bool:
        """Whether so many tokens are unknown that bits per byte are meaningless."""
        return self.unknown_share > UNKNOWN_SHARE

    @property
    def unknown_share(self) -> float:
        """The share of the tokens that stand for text which the tokenizer does not know."""
        return self.unknown / max(1, self.tokens)


@dataclass(frozen=True)
class Manifest:
    """The record of a folder of token files; a folder with a manifest is complete.

    name: the corpus. source: a description of the text. settings: what determined the bytes. dtype: uint16 or
    uint32, little-endian. vocab_size: an exclusive upper bound of the ids. tokenizer: the sha256 of tokenizer.json.
    validation: keyed by the name of the set. left_out: the number of skipped documents, keyed by the reason.
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
        """Return whether the folder has a manifest."""
        return Path(folder, FILE_NAME).is_file()

    @classmethod
    def read(cls, folder: str | Path) -> "Manifest":
        """Read the folder's manifest. Raises DataError where it is missing, invalid or of another version."""
        file = Path(folder, FILE_NAME)
        if not file.is_file():
            raise DataError("no token files", folder, f"Prepare them: {_PREPARE} with the same overrides.")
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            if record["version"] != VERSION:
                raise DataError(f"token files of version {record['version']}; expected {VERSION}", file, _REMEDY)
            record["train"] = _split(record["train"])
            record["validation"] = {name: _split(split) for name, split in record["validation"].items()}
            if record["dtype"] not in ("uint16", "uint32") or not isinstance(record["vocab_size"], int):
                raise ValueError(f"dtype {record['dtype']!r}, vocab_size {record['vocab_size']!r}")
            if not all(isinstance(record[name], dict) for name in ("source", "settings")):
                raise TypeError("source and settings must be objects")
            if len(record["validation"]) != 1:
                raise ValueError(f"{len(record['validation'])} validation sets")
            return cls(**record)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"not a manifest of token files ({error!r})", file, _REMEDY) from error

    def write(self, folder: str | Path) -> Path:
        """Write manifest.json into the folder and return the file's path."""
        file = Path(folder, FILE_NAME)
        replace_text(file, json.dumps(asdict(self), indent=2) + "\n")
        return file

    def digest(self) -> str:
        """Return a digest of all tokens: the same for the same bytes, wherever they are stored."""
        shards = [shard.sha256 for split in self.splits().values() for shard in split.files]
        return hashlib.sha256(" ".join(shards).encode()).hexdigest()

    def splits(self) -> dict[str, Split]:
        """Return all splits, keyed by the stem of their files: train, validation-<set>."""
        return {"train": self.train} | {f"validation-{name}": split for name, split in self.validation.items()}


def verify(folder: str | Path, show: Callable[[int], object] = lambda read: None) -> None:
    """Read every file and compare its digest with the manifest's. Raises DataError for the first file that differs.

    show: called after each file with its number of bytes.
    """
    manifest = Manifest.read(folder)
    expected = {"tokenizer.json": manifest.tokenizer}
    expected |= {shard.name: shard.sha256 for split in manifest.splits().values() for shard in split.files}
    for name, sha256 in expected.items():
        file = Path(folder, name)
        if not file.is_file():
            raise DataError("a token file is missing", file, _REMEDY)
        if digest(file) != sha256:
            raise DataError("a token file differs from its digest in the manifest", file, _REMEDY)
        show(file.stat().st_size)


def check_sizes(folder: str | Path, manifest: Manifest) -> None:
    """Raise DataError for a token file that is missing or is not as long as the manifest says."""
    item_bytes = 2 if manifest.dtype == "uint16" else 4
    for split in manifest.splits().values():
        for shard in split.files:
            file = Path(folder, shard.name)
            if not file.is_file():
                raise DataError("a token file is missing", file, _REMEDY)
            size, expected = file.stat().st_size, shard.tokens * item_bytes
            if size != expected:
                raise DataError(f"a token file of {size} bytes where the manifest says {expected}", file, _REMEDY)


def _split(record: dict[str, Any]) -> Split:
    split = Split(**(record | {"files": tuple(Shard(**shard) for shard in record["files"])}))
    counts = [split.tokens, split.documents, split.bytes, split.unknown, *(shard.tokens for shard in split.files)]
    names = [shard.name for shard in split.files]
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise TypeError(f"counts {counts}")
    # longer names raise OSError where the file is looked for
    if not all(isinstance(name, str) and 0 < len(name.encode()) < 256 and not {"/", "\0"} & {*name} for name in names):
        raise ValueError("a name that no file in the folder can have")
    return split
