"""Files that survive a power cut."""

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import yaml

CHUNK, SYNC_EVERY = 2**25, 2**27


def _umask() -> int:
    # to ask for it is to set it, which other threads would see: once, at the import
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


UMASK = _umask()


def usual_mode(path: Path) -> None:
    """Give a file the mode of a new one: safetensors makes its files for their owner alone."""
    path.chmod(0o666 & ~UMASK)


def sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(file: Path, text: str) -> None:
    """Put the text in place of the file's, by one rename: a kill leaves the old text or the new one."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    os.replace(temporary, file)


def read_yaml(file: Path) -> dict[str, Any]:
    """The keys of a YAML file, as plain data; {} where it is missing, broken or has none."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        found = yaml.load(file.read_text(), Loader=loader)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def digest(file: Path) -> str:
    """The SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class LargeFile:
    """A large file to write: digested and brought to the disk while it is written, and then forgotten by the cache.

    What the cache holds back is written all at the end, and needs memory that others use: on a virtual machine, whose
    memory comes from its host page by page, that is slower than the disk.
    """

    def __init__(self, path: Path) -> None:
        self.file: BinaryIO = path.open("wb")
        self.sha256 = hashlib.sha256()
        self.pool = ThreadPoolExecutor(2)
        self.unsynced, self.syncing = 0, Future[None]()
        self.syncing.set_result(None)

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes. Raises OSError."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK):
            chunk = view[start : start + CHUNK]
            hashed = self.pool.submit(self.sha256.update, chunk)
            try:
                self.file.write(chunk)
                self.unsynced += len(chunk)
                if self.unsynced >= SYNC_EVERY:
                    self._sync()
            finally:
                hashed.result()  # the bytes are the caller's again
        return len(view)

    def flush(self) -> None:
        """Nothing: `close` does."""

    def close(self) -> str:
        """Wait until all is on the disk; the SHA-256 of it. Raises OSError."""
        try:
            self._sync()
            self.syncing.result()
        finally:
            self.pool.shutdown()
            self.file.close()
        return self.sha256.hexdigest()

    def _sync(self) -> None:
        self.file.flush()
        self.syncing.result()
        self.syncing, self.unsynced = self.pool.submit(_forget, self.file.fileno()), 0


def _forget(descriptor: int) -> None:
    os.fsync(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
