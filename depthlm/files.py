"""The reading of files that others may have written, writes that survive a power cut, and other helpers for files."""

import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import yaml

CHUNK, SYNC_EVERY = 2**25, 2**27
# errors of a system that has no more space, memory, files or processes, or takes no such name
LIMITS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ENOMEM, errno.EMFILE, errno.ENFILE,
    errno.ENAMETOOLONG, errno.EIO,
}  # fmt: skip
LIMIT_WORDS = (*map(os.strerror, LIMITS), "can't allocate memory", "can't start new thread", "failed to map segment")
# the most bytes and levels of a file that describes a run; files that we write have some 10 KB and five levels
MAX_BYTES, MAX_DEPTH = 2**26, 50
# the one in C, which reads ten times as fast, is not in every build of PyYAML
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _umask() -> int:
    # reading the umask means setting it, which other threads would notice, so this runs once, at import
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


UMASK = _umask()


def set_default_mode(path: Path) -> None:
    """Give a file the default mode of a new file, because safetensors creates files that only their owner can read."""
    path.chmod(0o666 & ~UMASK)


def system_limit(error: BaseException) -> str | None:
    """Return the limit of the system that an error is about: space, memory, the length of a name; None for others.

    Libraries that are not written in Python have errors of their own, with the words of the system.
    """
    if isinstance(error, MemoryError):
        return "out of memory"
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in LIMITS:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return text if any(words in text for words in LIMIT_WORDS) else None


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(file: Path, text: str) -> None:
    """Replace the content of a file by one rename, so that a kill leaves either the old text or the new one.

    After the return, a power cut leaves the new one.
    """
    temporary = file.with_name(f".{file.name}.tmp")
    # a link there could lead anywhere
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    sync(temporary)
    os.replace(temporary, file)
    sync(file.parent)


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path beside a file, with its suffix, for a library to write to; it then replaces the file by one rename.

    A file that could not be written completely is removed, and the old one stays.
    """
    temporary = file.with_name(f".{file.stem}.tmp{file.suffix}")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(file.parent)


def make_folder(folder: Path) -> None:
    """Create a folder with its parents. After the return, they survive a power cut."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def open_regular(file: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError for anything but a regular file: a pipe or a device may never end."""
    return os.fdopen(_descriptor(file, os.O_RDONLY), "rb")


def open_appending(file: Path) -> TextIO:
    """Open or create a file for appending, or as a lock. Raises OSError for anything but a regular file."""
    return os.fdopen(_descriptor(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", encoding="utf-8")


def _descriptor(file: Path, flags: int) -> int:
    # without O_NONBLOCK, a pipe would wait for a process at its other end
    descriptor = os.open(file, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    return descriptor


def check_regular(file: Path) -> None:
    """Raise OSError if something else than a regular file is in the place of a file that a library writes to."""
    if file.exists():
        os.close(_descriptor(file, os.O_RDONLY))


def read_bytes(file: Path) -> bytes:
    """Return the content of a file that describes something. Raises OSError, also above MAX_BYTES."""
    with open_regular(file) as stream:
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"larger than {MAX_BYTES >> 20} MiB", str(file))
    return content


def read_text(file: Path) -> str:
    """Return the text of a file. Raises OSError, also above MAX_BYTES, and ValueError if not UTF-8."""
    return read_bytes(file).decode()


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is missing, broken or contains something else."""
    try:
        content = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the content of a YAML file as plain data; {} if the file is missing, broken or not a mapping.

    A file that `check_yaml` refuses counts as broken.
    """
    try:
        text = read_text(file)
        check_yaml(text)
        content = yaml.load(text, Loader=YAML_LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def check_yaml(text: str) -> None:
    """Raise YAMLError for YAML that is broken, nested deeper than MAX_DEPTH, or that has aliases or tags.

    A few lines with aliases can expand to more than fits in memory, tags make objects, and depthlm writes neither.
    """
    depth = 0
    for event in yaml.parse(text, Loader=YAML_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        is_alias, tag = isinstance(event, yaml.AliasEvent), getattr(event, "tag", None)
        if is_alias or tag is not None or depth > MAX_DEPTH:
            what = "an alias" if is_alias else f"the tag {tag}" if tag is not None else "nested too deep"
            raise yaml.composer.ComposerError(None, None, what, event.start_mark)


def add_digest(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the SHA-256 of everything else in it."""
    content = {name: value for name, value in record.items() if name != "sha256"}
    return content | {"sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def is_intact(record: dict[str, Any]) -> bool:
    """Return whether a record has the digest of `add_digest`, so that it has not changed since."""
    return record.get("sha256") == add_digest(record)["sha256"]


def is_inside(file: Path, folder: Path) -> bool:
    """Return whether a file is inside a folder, also after following links.

    Links into the blobs of a Hugging Face cache count as inside the snapshot that consists of them.
    """
    folder = folder.absolute()
    caches = [parent.parent / "blobs" for parent in folder.parents if parent.name == "snapshots"]
    caches = [cache for cache in caches if not cache.is_symlink()]
    return any(file.resolve().is_relative_to(root.resolve()) for root in (folder, *caches))


def digest(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Raises OSError."""
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a staging folder, which replaces `folder` when the context exits without an error. Raises OSError.

    A power cut leaves the old folder or the new one. Of several processes that replace one folder, each has its own
    staging folder, and the last one wins.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        # an export that was killed leaves a staging folder without a lock
        with lock_folder(folder.parent):
            for abandoned in folder.parent.glob(f".{glob.escape(folder.name)}.*.partial"):
                with suppress(OSError), lock_folder(abandoned, fcntl.LOCK_NB):
                    shutil.rmtree(abandoned, ignore_errors=True)
            staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
            stack.callback(shutil.rmtree, staging, ignore_errors=True)
            stack.enter_context(lock_folder(staging))
        new, old = staging / "new", staging / "old"
        new.mkdir()
        yield new
        for path in (*new.rglob("*"), new):
            sync(path)
        # otherwise, another process could move its folder there between the two renames
        with lock_folder(folder.parent):
            if folder.exists():
                os.replace(folder, old)
            try:
                os.replace(new, folder)
            except OSError:
                if old.exists():
                    os.replace(old, folder)
                raise


@contextmanager
def lock_folder(folder: Path, flags: int = 0) -> Iterator[None]:
    """Lock a folder against other processes; with LOCK_NB, raise BlockingIOError if another one has locked it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
        except BlockingIOError:
            raise
        except OSError:
            # on a file system without locks, an abandoned folder looks like one in use
            if flags:
                raise
        yield
    finally:
        os.close(descriptor)


class LargeFile:
    """A large file that is digested and flushed to the disk while it is written, and then evicted from the page cache.

    Otherwise the cache would flush everything at the end and occupy memory that other processes need. On a virtual
    machine, which gets its memory from the host page by page, that is slower than the disk.
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
            hashing = self.pool.submit(self.sha256.update, chunk)
            try:
                self.file.write(chunk)
                self.unsynced += len(chunk)
                if self.unsynced >= SYNC_EVERY:
                    self._sync()
            finally:
                hashing.result()  # the caller may reuse the bytes after `write` returns
        return len(view)

    def flush(self) -> None:
        """Do nothing; `close` flushes the file."""

    def close(self) -> str:
        """Wait until the file is on the disk, and return its SHA-256. Raises OSError."""
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
        self.syncing, self.unsynced = self.pool.submit(_sync_and_evict, self.file.fileno()), 0


def _sync_and_evict(descriptor: int) -> None:
    os.fsync(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
