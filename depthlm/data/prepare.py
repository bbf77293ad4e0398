"""Raw text to a folder of token files, once: whole or not there at all."""

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from depthlm.data.corpora import describe, source_files
from depthlm.data.encode import encode_corpus
from depthlm.data.errors import DataError
from depthlm.data.manifest import Manifest
from depthlm.data.settings import check_settings, token_folder

if TYPE_CHECKING:
    from depthlm.config.schema import Data


def prepare(data: "Data", progress: bool = True) -> Path:
    """Make the token files of this configuration unless they are there; their folder.

    The folder appears by one rename, so a killed call leaves nothing but a temporary sibling, which the next
    removes; of several processes at once, one prepares and the others wait. The same text and settings give the
    same bytes. progress: a bar on a terminal, else plain lines, on stderr.

    Raises DataError where the text is missing, has no document for training or for validation, or the folder
    cannot be written or holds something else.
    """
    folder = token_folder(data)
    console = Console(stderr=True, quiet=not progress, highlight=False, soft_wrap=True)
    if Manifest.exists(folder):
        _check_existing(data, folder, console)
        return folder
    if not re.fullmatch(r"\w[\w.-]*", data.name):
        raise DataError("not a name for files", f"data.name={data.name!r}", "Use letters, digits, `.`, `_` and `-`.")
    source_files(data)
    try:
        target = folder.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target, console):
            if not Manifest.exists(target):
                _make(data, target, console)
    except OSError as error:
        raise DataError(f"cannot prepare token files ({error})", folder, "Check the disk, or set data.path.") from error
    return folder


def _make(data: "Data", target: Path, console: Console) -> None:
    for left_over in target.parent.iterdir():
        if re.fullmatch(re.escape(target.name) + r"\.tmp-\d+", left_over.name):
            shutil.rmtree(left_over)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DataError("token files belong in an empty folder", target, "Empty it, or set another data.path.")
    start = time.monotonic()
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    console.print(f"preparing {target}")
    try:
        manifest = encode_corpus(data, temporary, console)
        tokenizer = temporary / "tokenizer.json"
        for path in (tokenizer, manifest.write(temporary), temporary):
            _sync(path)
        temporary.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    validation = manifest.validation[data.name]
    console.print(
        f"prepared {target}: {manifest.train.tokens:,} train and {validation.tokens:,} validation tokens, "
        f"{manifest.train.bytes / manifest.train.tokens:.2f} bytes a token, {time.monotonic() - start:.1f} s"
    )


def _check_existing(data: "Data", folder: Path, console: Console) -> None:
    manifest = Manifest.read(folder)
    check_settings(data, manifest)
    if data.source and Path(data.source).exists() and describe(data) != manifest.source:
        console.print(f"note: {data.source} has changed since {folder} was prepared; remove that to prepare it anew")


@contextmanager
def _lock(target: Path, console: Console) -> Iterator[None]:
    # The lock file stays: to remove it would let a third process lock a new one beside the second.
    with open(target.with_name(f".{target.name}.lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print(f"waiting for the process that prepares {target}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
