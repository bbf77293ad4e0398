"""The run directory: locking it, recording the run, and checking whether a configuration may resume in it."""

import dataclasses
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from depthlm.config import Config
from depthlm.config.keys import flatten
from depthlm.config.resolve import LENGTHS
from depthlm.config.saved import compare, fixed_changes, is_own, load_config, signed_config_text
from depthlm.distributed.launchers import Ranks
from depthlm.errors import UserError
from depthlm.files import make_folder, open_appending, read_json, read_text, read_yaml, replace_text
from depthlm.machine import environment
from depthlm.run_directory import RunDirectory
from depthlm.runs.checkpoints import has_checkpoint
from depthlm.runs.records import finite, is_locked

log = logging.getLogger("depthlm")
LOCK_SECONDS, SHARED_SECONDS = 10.0, 60.0


class InUseError(UserError):
    """Another process is training in the run directory."""


class DirectoryLostError(RuntimeError):
    """The run directory was removed or replaced while a process trained in it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            f"{directory} was removed or replaced while this run trained in it, so the run ends and writes nothing "
            "more there; the same command starts it again"
        )


@dataclass
class Claim:
    """What this process may do in a run directory.

    accepted: whether the run in it, if there is one, may be resumed with this configuration. lock: the locked file,
    on rank 0 while it trains. lost: whether the directory was removed or replaced in that time.
    """

    run: RunDirectory
    accepted: bool = False
    lock: TextIO | None = None
    lost: bool = False

    def intact(self) -> bool:
        """Return whether the directory is still the one that was locked; true without a lock."""
        if self.lock is None:
            return True
        try:
            return os.path.samestat(os.stat(self.run.lock), os.fstat(self.lock.fileno()))
        except OSError as error:
            # a file server that does not answer has lost nothing
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)

    def may_write(self) -> bool:
        """Return whether the directory holds no run of another process or configuration."""
        if self.lost or not self.intact():
            return False
        if self.lock is not None:
            return True
        if self.accepted:
            return not is_locked(self.run.lock)
        return not any(file.exists() for file in self.run.contents) and foreign_file(self.run) is None


@contextmanager
def record_failure(directory: Path, rank: int) -> Iterator[Claim]:
    """Write failure.json if the attempt fails, until the next attempt. Does not touch a run of another process."""
    claim = Claim(RunDirectory(directory))
    try:
        yield claim
    except Exception as error:
        write_failure(claim, error, rank)
        raise


def write_failure(claim: Claim, error: Exception, rank: int) -> None:
    """Write the time and the error to failure.json, on rank 0. A UserError does not create the directory."""
    mistake, directory = isinstance(error, UserError), claim.run.path
    if rank != 0 or isinstance(error, InUseError) or (mistake and not directory.exists()):
        return
    write_reason(claim, f"{error}" if mistake else f"{type(error).__name__}: {error}")


def write_reason(claim: Claim, reason: str) -> None:
    """Write the time, and why the attempt fails, to failure.json."""
    record = {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "error": reason}
    # if this cannot be written either, the original error still ends the run
    with suppress(OSError):
        if claim.may_write():
            claim.run.path.mkdir(parents=True, exist_ok=True)
            replace_text(claim.run.failure, json.dumps(record, indent=1) + "\n")


@contextmanager
def lock_run_directory(claim: Claim) -> Iterator[None]:
    """Create and lock the run directory; delete it afterwards if nothing was written to it.

    Raises UserError if it cannot be created, or if another process trains in it.
    """
    directory, lock_file = claim.run.path, claim.run.lock
    try:
        make_folder(directory)
        # without truncating it, since another process may hold it
        lock = open_appending(lock_file)
    except OSError as error:
        raise UserError(f"output_dir={directory}: cannot be created ({error})") from None
    with lock:
        _lock(lock, directory)
        claim.lock = lock
        try:
            yield
        finally:
            claim.lost = not claim.intact()
            if not claim.lost and os.listdir(directory) == [lock_file.name]:
                lock_file.unlink()
                directory.rmdir()
            claim.lock = None
            # data workers that have inherited the file would keep it locked
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)


def _lock(file: TextIO, directory: Path) -> None:
    # data workers of a killed run hold its lock until they notice that their parent has died
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise InUseError(
                    f"{directory}: another process trains in it; wait for it, or give another output_dir="
                ) from None
            time.sleep(0.2)
        except OSError as error:
            return log.warning(
                "%s cannot be locked (%s); make sure that no other process trains in it", directory, error
            )


def describe_run(config: Config, ranks: Ranks, steps: int, done: int) -> None:
    """Write the configuration and environment to the run directory. Raises UserError if that fails.

    steps: of the whole run. done: those after which it resumes; 0 if it starts.
    """
    run = RunDirectory.of(config.output_dir)
    try:
        if run.checkpoint_folders():
            differences = compare(dataclasses.asdict(load_config(run.path)), dataclasses.asdict(config))
            for name, words in differences.items():
                log.info("resuming with a changed setting: %s: %s", name, words)
            if differences.keys() & {*LENGTHS}:
                log.info("this run is now %d steps long; its directory keeps the name %s", steps, run.path.name)
        else:
            # it starts from scratch
            run.saved.unlink(missing_ok=True)
        if (summary := read_summary(run.path)) is not None:
            os.replace(run.summary, run.earlier_summary(summary["steps"]))
        # of a run that is being extended, or of steps that are trained again
        for step in run.extended_at():
            if step > done:
                os.replace(run.earlier_summary(step), run.lost_summary(step))
        run.failure.unlink(missing_ok=True)
        replace_text(run.config, signed_config_text(config))
        launched = {
            "world_size": ranks.world_size,
            "launcher": ranks.launcher,
            "nodes": ranks.nodes,
            "steps": steps,
        }
        described = environment.describe(environment.device_type(config.device)) | launched
        replace_text(run.environment, json.dumps(described, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"output_dir={run.path}: cannot be written to ({error})") from None


def mark_directory(claim: Claim) -> str:
    """Write a random mark into the locked file, and return it. Raises UserError if that fails."""
    assert claim.lock is not None
    mark = secrets.token_hex(16)
    try:
        claim.lock.truncate(0)
        claim.lock.write(mark)
        claim.lock.flush()
        os.fsync(claim.lock.fileno())
    except OSError as error:
        raise UserError(f"output_dir={claim.run.path}: cannot be written to ({error})") from None
    return mark


def check_shared(directory: Path, rank: int, mark: str) -> None:
    """Raise UserError if this rank cannot see the files of rank 0: all ranks write parts of each checkpoint.

    mark: that of `mark_directory` on rank 0, which an older run in a folder of another disk does not have.
    """
    deadline = time.monotonic() + SHARED_SECONDS
    while mark != _mark_in(directory):
        if time.monotonic() > deadline:
            raise UserError(
                f"output_dir={directory}: rank {rank} on {socket.gethostname()} does not see what rank 0 has "
                "written there; give a folder that all nodes share"
            )
        time.sleep(0.5)


def _mark_in(directory: Path) -> str | None:
    try:
        return read_text(RunDirectory(directory).lock)
    except (OSError, ValueError):
        return None


def check_run_directory(config: Config) -> dict[str, Any] | None:
    """Return the summary of the run directory if it contains a complete run of this configuration, otherwise None.

    Raises UserError if this configuration may not resume there, or if config.yaml cannot have it.
    """
    for name, value in flatten(dataclasses.asdict(config)).items():
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            shown = value.encode(errors="backslashreplace").decode()
            raise UserError(f"{name}={shown}: must be UTF-8, for config.yaml; rename it, or give a link to it")
    run = RunDirectory.of(config.output_dir)
    directory = run.path
    if special := special_file(run):
        raise UserError(
            f"output_dir={directory}: {special.name} is neither a file nor a folder, and a run could wait for it "
            "forever; remove it, or give another directory"
        )
    link = next((file for file in run.written if file.is_symlink() and not file.is_dir()), None)
    if link is not None and not is_own(directory):
        raise UserError(
            f"output_dir={directory}: you did not train this run on this machine, and {link.name} in it is a link to a "
            "file, or to nothing, which the run would change; remove it"
        )
    if foreign := foreign_file(run):
        raise UserError(
            f"output_dir={directory}: this is no run directory, and a run would overwrite {foreign.name} in it; give "
            f"another directory, as in output_dir={directory}/run"
        )
    if config.resume == "never" and any(file.exists() for file in run.contents):
        raise UserError(
            f"resume=never, but {directory} holds a run; give another directory, as in output_dir={directory}-2"
        )
    summary = read_summary(directory)
    if summary is None and not run.checkpoint_folders() and not run.saved.exists():
        # the run failed before its first checkpoint, so a new attempt loses nothing
        return None
    changed = fixed_changes(load_config(directory), config)
    refused = changed.keys() - ({*LENGTHS} if config.resume == "extend" else set())
    if refused:
        lines = "\n".join(f"  - {name}: {changed[name]}" for name in sorted(refused))
        longer = "resume=extend allows another length. " if refused <= {*LENGTHS} else ""
        remedy = "Give the same settings"
        if any(name.startswith("code.") for name in refused):
            remedy = "Restore the code of these classes, with all that it imports,"
        raise UserError(
            f"{directory} holds a run with another configuration:\n{lines}\n"
            f"{longer}{remedy} to resume it, or give another directory, as in output_dir={directory}-2; there "
            f"fork_from={directory} continues from its state, and init_from={directory} starts with its weights"
        )
    if changed.keys() & {*LENGTHS}:
        return None
    lost_its_last = (
        config.resume == "retrain" and summary is not None and not has_checkpoint(directory, summary["steps"])
    )
    return None if lost_its_last else summary


def special_file(run: RunDirectory) -> Path | None:
    """Return a pipe, socket or device in place of a file that a run reads or writes, or None."""
    return next((file for file in run.written if file.exists() and not (file.is_file() or file.is_dir())), None)


def foreign_file(run: RunDirectory) -> Path | None:
    """Return a file that a run would overwrite in a directory in which no run has written, or None."""
    settings, failure = read_yaml(run.config), read_json(run.failure)
    is_run = {"model", "training", "data"} <= settings.keys() or {"time", "error"} == failure.keys()
    # a configuration that is damaged is reported as such
    if is_run or run.lock.exists() or run.saved.exists() or run.checkpoint_folders():
        return None
    return next((file for file in run.written if file.exists()), None)


def read_summary(directory: Path) -> dict[str, Any] | None:
    """Return the summary of a complete run, otherwise None. Raises UserError if it cannot be read."""
    path = RunDirectory(directory).summary
    try:
        summary = json.loads(read_text(path)) if path.exists() else None
        if summary is not None:
            _check_summary(summary)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); delete it, and the same command writes it again") from None
    return summary


def _check_summary(summary: Any) -> None:
    """Raise ValueError unless a summary has the numbers that its table shows."""
    if not isinstance(summary, dict):
        raise ValueError("it is not an object")
    for name in ("steps", "tokens", "wall_seconds", "tokens_per_second", "peak_memory_gib"):
        if finite(summary.get(name)) is None:
            raise ValueError(f"{name} is not a number")
    if type(summary["steps"]) is not int:
        raise ValueError("steps is not a whole number")
    for name in ("validation_loss", "validation_perplexity", "unigram_entropy"):
        if name not in summary or (summary[name] is not None and finite(summary[name]) is None):
            raise ValueError(f"{name} is not a number or null")
