"""Preparation of folders of token files from raw text, one per source; a folder appears only when it is complete."""

import dataclasses
import fcntl
import functools
import io
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.filesize import decimal

from depthlm.console import stderr_console
from depthlm.counts import count_text, duration_text, format_count
from depthlm.data.corpora.documents import REASONS, documents, hash_share, is_validation, pieces
from depthlm.data.corpora.formats import PARQUET, split_codec
from depthlm.data.corpora.sources import all_sources, is_remote, text_files, train_sources
from depthlm.data.manifest import Manifest, check_sizes, dtype_of, little_endian
from depthlm.data.preparation import progress as progress_file
from depthlm.data.preparation.encode import Job, encode, held_out_fraction, identity, reading
from depthlm.data.settings import Data, Source
from depthlm.data.token_files import check_settings, check_tokenizer, quota, settings, token_folder, vocab_size
from depthlm.data.tokenizers import (
    TOKENIZER_CONFIG,
    Tokenizer,
    check_end_of_text,
    is_on_hub,
    load_tokenizer,
    parallel_tokenizers,
    sample_bytes,
    train_bpe,
)
from depthlm.errors import DataError
from depthlm.files import open_appending, sync
from depthlm.machine import environment

# Bytes of text that one core tokenises per second with a BPE of 50 000 tokens.
BYTES_PER_CORE_SECOND = 2e6
# A lower bound of the bytes of text per token: English has 4.4 with such a BPE, code has 3 with a small one.
BYTES_PER_TOKEN = 3.0
# Uncompressed bytes per compressed byte, for local files.
COMPRESSION = 2.7
# Training prepares up to this many bytes of text itself, which takes some minutes.
MAX_TRAINING_BYTES = 2**30
_MAY_HAVE_CHANGED = "may have changed (the same names and sizes, but files were written, copied or renamed)"


def prepare(data: Data, only: Collection[str] = ()) -> dict[str, Path]:
    """Make the token files of this configuration unless they exist, and return the folder of each source, by name.

    only: the sources and validation sets to prepare; empty: all.

    A folder appears by one rename. A killed call leaves <folder>.partial, and the next call resumes from its last
    complete shard. Of several processes at once, one prepares and the others wait. The same text and settings give the
    same bytes, with or without interruptions.

    Raises DataError where the text is missing or bad, has no document for training or for validation, or the folder
    cannot be written, contains other files, or is being prepared with other settings.
    """
    console = stderr_console(soft_wrap=True)
    sources = all_sources(data)
    for name in [data.name, *sources]:
        check_name(name)
    check_only(data, only)
    tokenizer = functools.cache(lambda: make_tokenizer(data, console))
    return {
        name: _Preparation(name, source, data, tokenizer, console).run()
        for name, source in sources.items()
        if not only or name in only
    }


def check_only(data: Data, only: Collection[str]) -> None:
    """Raise DataError for a name of no source or validation set."""
    sources = all_sources(data)
    if unknown := sorted({*only} - {*sources}):
        raise DataError("no such source", ", ".join(unknown), f"There are: {', '.join(sources)}.")


def check_name(name: str) -> None:
    """Raise DataError for a name that the files of a split cannot have."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise DataError("not a valid name for files", f"{name!r}", "Use letters, digits, `.`, `_` and `-`.")


def make_tokenizer(data: Data, console: Console) -> Tokenizer:
    """Return the tokenizer of this configuration; `bpe` is trained here, on documents that are not held out.

    Raises DataError where the tokenizer is not available, has more tokens than data.vocab_size or no end of text.
    """
    if data.tokenizer == "bpe":
        check_end_of_text(data.tokenizer, data.end_of_text)
        console.print(f"training a tokenizer of {data.vocab_size:,} tokens")
        with parallel_tokenizers():
            return train_bpe(_text_for_training(data), data.vocab_size)
    tokenizer = load_tokenizer(data.tokenizer, data.end_of_text)
    if data.tokenizer == "bytes":
        return tokenizer
    end = tokenizer.end
    console.print(f"end of text: {end.token!r} (id {end.id}), by {end.source}", markup=False)
    if tokenizer.dropout:
        console.print(f"the tokenizer's BPE dropout of {tokenizer.dropout:g} is off: the same text has the same tokens")
    if tokenizer.drops_unknown:
        console.print(
            "warning: the tokenizer has no token for characters that it does not know, and drops them: this text is "
            "lost, and is not counted"
        )
    if is_on_hub(data.tokenizer) and tokenizer.vocab_size > data.vocab_size:
        what = f"the tokenizer has {tokenizer.vocab_size} tokens, data.vocab_size is {data.vocab_size}"
        raise DataError(what, data.tokenizer, f"Set data.vocab_size={tokenizer.vocab_size}.")
    return tokenizer


def _text_for_training(data: Data) -> Iterator[str]:
    for name, source in train_sources(data).items():
        files = text_files(name, source)
        fraction = held_out_fraction(files, source, data)
        pairs = documents(files.train, *reading(source, data))
        train_pairs = ((name, text) for name, text in pairs if not is_validation(identity(name, text, data), fraction))
        yield from _sample(train_pairs, sample_bytes(data.vocab_size), files.description.get("bytes"))


def _sample(texts: Iterable[tuple[str, str]], sample_size: int, total_bytes: int | None) -> Iterator[str]:
    """Yield about `sample_size` bytes of text, in pieces chosen by a hash of document name and number.

    total_bytes: of the source; None: unknown, so the first `sample_size` bytes are yielded.
    """
    fraction = sample_size / max(total_bytes, 1) if total_bytes is not None else 1.0
    taken = 0
    for name, text in texts:
        for number, piece in enumerate(pieces(io.StringIO(text, newline=""), 2**16)):
            if fraction >= 1 or hash_share(f"{number}:{name}") < fraction:
                taken += len(piece)
                yield piece
        if total_bytes is None and taken >= sample_size:
            return


@dataclass(frozen=True)
class _Preparation:
    """The preparation of one source. tokenizer: returns the tokenizer, which the first call makes."""

    name: str
    source: Source
    data: Data
    tokenizer: Callable[[], Tokenizer]
    console: Console

    @cached_property
    def folder(self) -> Path:
        """The folder of the token files."""
        return token_folder(self.name, self.source, self.data)

    @cached_property
    def target(self) -> Path:
        """The absolute path of this folder."""
        return self.folder.resolve()

    @property
    def partial(self) -> Path:
        """The folder in which the token files are prepared."""
        return self.target.with_name(f"{self.target.name}.partial")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What determines the bytes of the token files, except the text."""
        return settings(self.name, self.source, self.data)

    def run(self) -> Path:
        """Make the token files unless they exist, and return their folder."""
        if Manifest.exists(self.folder):
            self.check_existing()
            return self.folder
        if not is_remote(self.source):
            text_files(self.name, self.source)  # raises for missing text before anything is created
        remedy = "Free some space or fix the cause, then run the same command: it resumes from the last complete shard."
        with lock_tokens(self.target, remedy, self.console) as complete:
            if complete:
                self.check_existing()
            else:
                self.make()
        return self.folder

    def make(self) -> None:
        """Make the token files; they must not exist, and the lock must be held."""
        start, partial = time.monotonic(), self.partial
        progress_file.check_mark(partial, self.settings)
        if Manifest.exists(partial) and Manifest.read(partial).settings == self.settings:
            # killed between the last token and the rename
            publish(partial, self.target)
            return
        manifest = encode(self.begin())
        manifest.write(partial)
        publish(partial, self.target)
        _print_summary(manifest, self.target, time.monotonic() - start, self.console)

    def begin(self) -> Job:
        """Create the folder in preparation with its tokenizer, or resume in a folder of the same settings and text."""
        source, target, partial, console = self.source, self.target, self.partial, self.console
        check_empty(target)
        earlier = progress_file.read(partial)
        if earlier is not None and earlier["settings"] != self.settings:
            earlier = None
        files = text_files(self.name, source, revision=earlier["source"].get("revision") if earlier else None)
        for note in files.unread:
            console.print(f"not read in {source.source}: {note}", markup=False)
        if earlier is None or earlier["source"] != files.description or earlier["state"] != files.state:
            if partial.exists():
                why = "no complete shard or no valid progress.json" if earlier is None else "its text has changed"
                console.print(f"restarting {target} from scratch: {why}")
                progress_file.clear(partial)
            needed = check_disk_space(self.name, source, self.data, target.parent)
            console.print(f"preparing {target}{f': {needed.words()}' if needed is not None else ''}")
            progress_file.begin(partial, self.settings, self.tokenizer())
        else:
            console.print(f"resuming {target}")
            if earlier.get("times") != files.times:
                console.print(f"note: {source.source} {_MAY_HAVE_CHANGED} since {target} was begun")
                # so that the manifest shows the change too
                files = dataclasses.replace(files, times=earlier.get("times") or "")
        tokenizer = Tokenizer.load(partial)
        check_tokenizer(tokenizer, self.data)
        return Job(self.name, source, self.data, files, self.settings, tokenizer, partial, console)

    def check_existing(self) -> None:
        """Check complete token files, and note a change of their text. Raises DataError if they cannot be used."""
        source, folder = self.source, self.folder
        manifest = Manifest.read(folder)
        check_settings(self.name, source, self.data, manifest)
        check_sizes(folder, manifest)
        _warn_of_unknown(manifest, folder, self.console)
        if not source.source or not Path(source.source).exists():
            return
        files, prepared = text_files(self.name, source), {**manifest.source}
        times = prepared.pop("times", files.times)
        if files.description != prepared or files.times != times:
            changed = "has changed" if files.description != prepared else _MAY_HAVE_CHANGED
            self.console.print(
                f"note: {source.source} {changed} since {folder} was prepared; remove {folder} to prepare it again"
            )


@contextmanager
def lock_tokens(target: Path, remedy: str, console: Console) -> Iterator[bool]:
    """Hold the lock of a folder of token files, and yield whether it is complete.

    Raises what the system refuses within the context, such as on a full disk, as DataError.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # The lock file is never removed: a third process could then lock a new file while the second holds the old one.
        with open_appending(target.with_name(f".{target.name}.lock")) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                console.print(f"waiting for the process that prepares {target}")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield Manifest.exists(target)
    except (OSError, MemoryError) as error:
        reason = str(error) or "out of memory"
        raise DataError(f"cannot prepare token files ({reason})", target, remedy) from error


def check_empty(target: Path) -> None:
    """Raise DataError if something is in the place of new token files, or their folder cannot be moved there."""
    if target.is_mount() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise DataError("token files need an empty folder, no mount point", target, "Empty it, or give one inside it.")


def publish(partial: Path, target: Path) -> None:
    """Rename a complete folder into place, without the files that only its preparation needs."""
    manifest = Manifest.read(partial)
    shards = {shard.name for split in manifest.splits().values() for shard in split.files}
    for file in partial.iterdir():
        if file.is_dir():
            shutil.rmtree(file, ignore_errors=True)
        elif file.name not in {"manifest.json", "tokenizer.json", TOKENIZER_CONFIG, *shards}:
            file.unlink()
    sync(partial)
    if target.exists():
        target.rmdir()
    partial.rename(target)
    sync(target.parent)


def _print_summary(manifest: Manifest, target: Path, seconds: float, console: Console) -> None:
    train, validation = manifest.train, manifest.validation[manifest.name]
    text_bytes, tokens = train.bytes + validation.bytes, train.tokens + validation.tokens
    split = f"{train.tokens:,} train and " if train.tokens else ""
    console.print(
        f"prepared {target}: {split}{validation.tokens:,} validation tokens, "
        f"{text_bytes / tokens:.2f} bytes per token, {seconds:.1f} s"
    )
    _warn_of_unknown(manifest, target, console)
    for reason, count in manifest.left_out.items():
        console.print(f"skipped {count:,} {REASONS[reason]}")


def _warn_of_unknown(manifest: Manifest, folder: Path, console: Console) -> None:
    for stem, split in manifest.splits().items():
        if split.hides_text:
            console.print(
                f"warning: {folder}, {stem}: {split.unknown_share:.1%} of the tokens stand for text that the tokenizer "
                "does not know: this text is lost, and bits per byte mean nothing; set data.tokenizer to one for it"
            )


class Estimate(NamedTuple):
    """What preparing takes: tokens, bytes of token files, text and download, and seconds on this machine."""

    tokens: float
    disk_bytes: float
    text_bytes: float
    download_bytes: float
    seconds: float

    def words(self) -> str:
        """Return the estimate in words."""
        disk = f"about {decimal(round(self.disk_bytes))} of disk for {count_text(round(self.tokens))} tokens"
        download = f"{decimal(round(self.download_bytes))} of download, " if self.download_bytes else ""
        cores = format_count(environment.cores(), "core")
        return f"{disk}, {download}{duration_text(self.seconds)} on {cores} of this machine"


def estimate(name: str, source: Source, data: Data) -> Estimate | None:
    """Return the estimate for a source; null where its size is unknown. Raises DataError where its text is missing."""
    text_bytes, download = source.text_bytes, source.download_bytes or 0
    known_tokens = source.num_tokens if data.tokenizer != "bytes" else None
    if not is_remote(source):
        files = text_files(name, source)
        text_bytes = download = 0
        known_tokens = None
        for file in (*files.train, *(files.held_out or ())):
            plain, codec = split_codec(file.name)
            is_compressed = codec is not None or plain.endswith(PARQUET)
            text_bytes += round(Path(file.location).stat().st_size * (COMPRESSION if is_compressed else 1))
    if text_bytes is None:
        return None
    tokens = known_tokens or text_bytes / (1.0 if data.tokenizer == "bytes" else BYTES_PER_TOKEN)
    limit = None if name in data.validation else quota(name, data)
    share = min(1.0, limit / max(tokens, 1)) if limit is not None else 1.0
    token_bytes = share * tokens * little_endian(dtype_of(vocab_size(data))).itemsize
    seconds = share * text_bytes / (BYTES_PER_CORE_SECOND * environment.cores())
    return Estimate(share * tokens, token_bytes, share * text_bytes, share * download, seconds)


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
    takes = [Estimate(*map(sum, zip(*known, strict=True))).words()] if known else []
    if unknown := [name for name, needed in missing.items() if needed is None]:
        takes.append(f"an unknown amount for {', '.join(unknown)}")
    remedy = f"Prepare it, which takes {', '.join(takes)}:\n    {command()}"
    raise DataError(f"not prepared: {', '.join(missing)}", f"data={data.name}", remedy)
