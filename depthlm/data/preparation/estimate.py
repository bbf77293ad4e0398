"""Estimates of what preparing a source takes: tokens, disk space and time."""

import shutil
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

from rich.filesize import decimal

from depthlm.counts import count_text, duration_text
from depthlm.data.corpora.formats import PARQUET, split_codec
from depthlm.data.corpora.sources import all_sources, is_remote, text_files
from depthlm.data.manifest import Manifest, dtype_of, little_endian
from depthlm.data.settings import Data, Source
from depthlm.data.token_files import quota, token_folder, vocab_size
from depthlm.errors import DataError
from depthlm.machine import environment

# Bytes of text that one core tokenises per second with a BPE of 50 000 tokens.
BYTES_PER_CORE_SECOND = 2e6

# A lower bound of the bytes of text per token: English has 4.4 with such a BPE, code has 3 with a small one.
BYTES_PER_TOKEN = 3.0

# Uncompressed bytes per compressed byte, for local files.
_COMPRESSION = 2.7

# Training prepares up to this many bytes of text itself, which takes some minutes.
MAX_TRAINING_BYTES = 2**30


@dataclass(frozen=True)
class Estimate:
    """What preparing takes: tokens, bytes of token files, text and download, and seconds on this machine."""

    tokens: float
    disk_bytes: float
    text_bytes: float
    download_bytes: float
    seconds: float

    def words(self) -> str:
        """Return the estimate in words."""
        cores = environment.cores()
        download = f"{decimal(round(self.download_bytes))} of download, " if self.download_bytes else ""
        count = "one core" if cores == 1 else f"{cores} cores"
        tokens = count_text(round(self.tokens))
        disk = (
            f"about {decimal(round(self.disk_bytes))} of disk for {tokens} tokens"
            if self.disk_bytes
            else "almost no disk"
        )
        return f"{disk}, {download}{duration_text(self.seconds)} on {count} of this machine"


def estimate(name: str, source: Source, data: Data) -> Estimate | None:
    """Return the estimate for a source; null where its size is unknown. Raises DataError where its text is missing."""
    text_bytes, download = source.text_bytes, source.download_bytes or 0
    per_token = 1.0 if data.tokenizer == "bytes" else BYTES_PER_TOKEN
    if not is_remote(source):
        files = text_files(name, source)
        local = [Path(file.location) for file in (*files.train, *(files.held_out or ()))]
        text_bytes = round(sum(file.stat().st_size * _compression(file.name) for file in local))
        download = 0
    if text_bytes is None:
        return None
    known_tokens = source.num_tokens if is_remote(source) and data.tokenizer != "bytes" else None
    tokens = known_tokens or text_bytes / per_token
    limit = None if name in data.validation else quota(name, data)
    share = min(1.0, limit / tokens) if limit is not None else 1.0
    item_bytes = little_endian(dtype_of(vocab_size(data))).itemsize
    rate = BYTES_PER_CORE_SECOND * environment.cores()
    return Estimate(
        share * tokens, share * tokens * item_bytes, share * text_bytes, share * download, share * text_bytes / rate
    )


def _compression(name: str) -> float:
    """Return about how many bytes of text a byte of a local file holds."""
    plain, codec = split_codec(name)
    return _COMPRESSION if codec is not None or plain.endswith(PARQUET) else 1.0


def check_disk_space(name: str, source: Source, data: Data, folder: Path) -> Estimate | None:
    """Return the estimate. Raises DataError where the folder's disk has less free space than the token files take."""
    needed, free = estimate(name, source, data), shutil.disk_usage(folder).free
    if needed is not None and needed.disk_bytes > free:
        takes = decimal(round(needed.disk_bytes))
        what = f"{name}'s token files will take about {takes} while they are prepared, and {decimal(free)} are free"
        raise DataError(what, folder, "Free some space, set data.path to another disk, or lower data.max_tokens.")
    return needed


def check_prepared(data: Data, command: Callable[[], str]) -> None:
    """Raise DataError where a source is not prepared and is too large for training to prepare.

    command: returns the command that prepares it; called only for the error message.
    """
    missing = {}
    for name, source in all_sources(data).items():
        if not Manifest.exists(token_folder(name, source, data)):
            missing[name] = estimate(name, source, data)
    known = [needed for needed in missing.values() if needed is not None]
    if len(known) == len(missing) and sum(needed.text_bytes for needed in known) <= MAX_TRAINING_BYTES:
        return
    takes = [Estimate(*map(sum, zip(*map(astuple, known), strict=True))).words()] if known else []
    if unknown := [name for name, needed in missing.items() if needed is None]:
        takes.append(f"an unknown amount for {', '.join(unknown)}")
    remedy = f"Prepare it, which takes {', '.join(takes)}:\n    {command()}"
    raise DataError(f"not prepared: {', '.join(missing)}", f"data={data.name}", remedy)
