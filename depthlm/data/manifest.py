"""The manifest of a folder of token files: what it contains and what it was made from."""

import functools
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from depthlm.errors import DataError
from depthlm.files import digest, read_text, replace_text
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

Dtype = Literal["uint16", "uint32"]
Number = Annotated[int, Field(strict=True, ge=0)]


@dataclass(frozen=True)
class Shard:
    """One file: its name in the folder, its number of tokens, and the sha256 of its bytes."""

    name: Annotated[str, Field(pattern="^[^/]+$")]
    tokens: Number
    sha256: str


@dataclass(frozen=True)
class Split:
    """One split: the numbers of its tokens (with an end of text after each document), documents and UTF-8 bytes.

    unigram_entropy: of the split's distribution of tokens, in nats per token; null except for train. unknown: the
    number of unknown tokens.
    """

    tokens: Number
    documents: Number
    bytes: Number
    files: tuple[Shard, ...]
    unigram_entropy: float | None = None
    unknown: Number = 0

    def first_tokens(self, tokens: int) -> str:
        """Return a name of the first tokens: the same for the same text and tokenizer, wherever they are stored."""
        digest = hashlib.sha256(" ".join(shard.sha256 for shard in self.files).encode()).hexdigest()
        return f"{digest[:16]}, {tokens} tokens"

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
    dtype: Dtype
    vocab_size: Number
    tokenizer: str
    train: Split
    validation: Annotated[dict[str, Split], Field(min_length=1, max_length=1)]
    left_out: dict[str, int]
    version: int = VERSION

    @staticmethod
    def exists(folder: str | Path) -> bool:
        """Return whether the folder has a manifest."""
        # Path.is_file raises OSError for a name that is too long
        return os.path.isfile(Path(folder, FILE_NAME))

    @classmethod
    def read(cls, folder: str | Path) -> "Manifest":
        """Read the folder's manifest. Raises DataError where it is missing, invalid or of another version."""
        file = Path(folder, FILE_NAME)
        if not cls.exists(folder):
            raise DataError("no token files", folder, f"Prepare them: {_PREPARE} with the same overrides.")
        try:
            record = json.loads(read_text(file))
            if isinstance(record, dict) and record.get("version") != VERSION:
                raise DataError(f"token files of version {record.get('version')}; expected {VERSION}", file, _REMEDY)
            return _adapter().validate_python(record)
        except ValidationError as error:
            mistake = error.errors()[0]
            why = f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}"
        except (OSError, ValueError, RecursionError) as error:
            why = repr(error)
        raise DataError(f"not a manifest of token files ({why})", file, _REMEDY)

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


@functools.cache
def _adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def verify(folder: str | Path, show: Callable[[int], object] = lambda read: None) -> None:
    """Read every file and compare its digest with the manifest's. Raises DataError for the first file that differs.

    show: called after each file with its number of bytes.
    """
    manifest = Manifest.read(folder)
    check_sizes(folder, manifest)
    expected = {shard.name: shard.sha256 for split in manifest.splits().values() for shard in split.files}
    for name, sha256 in ({"tokenizer.json": manifest.tokenizer} | expected).items():
        file = Path(folder, name)
        if not file.is_file() or digest(file) != sha256:
            raise DataError("a token file differs from its digest in the manifest, or is missing", file, _REMEDY)
        show(file.stat().st_size)


def check_sizes(folder: str | Path, manifest: Manifest) -> None:
    """Raise DataError for a token file that is missing or is not as long as the manifest says."""
    item_bytes = little_endian(manifest.dtype).itemsize
    for split in manifest.splits().values():
        for shard in split.files:
            file = Path(folder, shard.name)
            if not os.path.isfile(file):  # Path.is_file raises OSError for a name that is too long
                raise DataError("a token file is missing", file, _REMEDY)
            size, expected = file.stat().st_size, shard.tokens * item_bytes
            if size != expected:
                raise DataError(f"a token file of {size} bytes where the manifest says {expected}", file, _REMEDY)


def dtype_of(vocab_size: int) -> Dtype:
    """Return the dtype of the token files: uint16 where every id fits, else uint32."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def little_endian(dtype: str) -> np.dtype[Any]:
    """Return the little-endian dtype, as stored in the files."""
    return np.dtype(dtype).newbyteorder("<")
