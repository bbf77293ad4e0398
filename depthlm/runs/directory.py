"""The run directory: what it holds, and whether this configuration may go on in it."""

import dataclasses
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from omegaconf import OmegaConf

from depthlm.config import Config
from depthlm.config.resolve import CHANGEABLE, LENGTHS
from depthlm.config.saved import compare, saved_config
from depthlm.distributed.launchers import Ranks
from depthlm.errors import UserError
from depthlm.files import replace_text
from depthlm.machine import environment
from depthlm.runs.checkpoints import has_checkpoint
from depthlm.runs.records import FAILURE, SUMMARY

log = logging.getLogger("depthlm")
LOCK_SECONDS, SHARED_SECONDS = 10.0, 60.0
HOLDS_A_RUN = ("config.yaml", "checkpoints", "metrics.jsonl", SUMMARY)


class InUseError(UserError):
    """Another process trains in the run directory."""


@contextmanager
def record_failure(directory: Path, rank: int) -> Iterator[None]:
    """Leave why an attempt failed in failure.json, until another is made. A run of another process is not touched."""
    try:
        yield
    except InUseError:
        raise
    except Exception as error:
        write_failure(directory, error, rank)
        raise


def write_failure(directory: Path, error: Exception, rank: int) -> None:
    """Write failure.json, on the first rank: the time, and the error in words. A user's mistake makes no folder."""
    mistake = isinstance(error, UserError)
    if rank != 0 or (mistake and not directory.exists()):
        return
    kind = "" if mistake else f"{type(error).__name__}: "
    told = {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "error": f"{kind}{error}"}
    # where even this cannot be written, the error itself still ends the run
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        replace_text(directory / FAILURE, json.dumps(told, indent=1) + "\n")


@contextmanager
def lock_run_directory(directory: Path) -> Iterator[Path]:
    """Make the run directory and hold it for this process; one that nothing was written to is gone afterwards.

    Raises UserError where it cannot be made, or another process trains in it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("w")
    except OSError as error:
        raise UserError(f"output_dir={directory}: cannot be made ({error})") from None
    with lock:
        _lock(lock, directory)
        try:
            yield directory
        finally:
            if os.listdir(directory) == [".lock"]:
                (directory / ".lock").unlink()
                directory.rmdir()


def _lock(file: TextIO, directory: Path) -> None:
    # the workers of a killed run hold its lock until they notice that it is gone
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
            return log.warning("%s cannot be locked (%s): see that no other process trains in it", directory, error)


def describe_run(config: Config, ranks: Ranks) -> None:
    """Write configuration and environment into the run directory. Raises UserError where that fails."""
    directory = Path(config.output_dir or "")
    try:
        if any(directory.glob("checkpoints/step-*")):
            for name, words in compare(saved_config(directory), dataclasses.asdict(config)).items():
                log.info("going on with another setting: %s: %s", name, words)
        if (summary := finished(directory)) is not None:
            # the run is being extended: what it came to before stays
            os.replace(directory / SUMMARY, directory / f"summary-step-{summary['steps']:08d}.json")
        (directory / FAILURE).unlink(missing_ok=True)
        replace_text(directory / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))
        (directory / "environment.json").write_text(
            json.dumps(environment.describe(ranks, environment.device_type(config.device)), indent=1) + "\n"
        )
    except OSError as error:
        raise UserError(f"output_dir={directory}: cannot be written to ({error})") from None


def check_shared(directory: Path, rank: int) -> None:
    """Raise UserError where this rank does not see what the first has written: each writes its part of a checkpoint."""
    deadline = time.monotonic() + SHARED_SECONDS
    while not (directory / "config.yaml").exists():
        if time.monotonic() > deadline:
            raise UserError(
                f"output_dir={directory}: rank {rank} on {socket.gethostname()} does not see what the first rank has "
                "written there; give a folder that all nodes share"
            )
        time.sleep(0.5)


def check_run_directory(config: Config) -> dict[str, Any] | None:
    """The summary of a complete run with this configuration in its directory, else None.

    Raises UserError where this configuration may not go on there.
    """
    directory = Path(config.output_dir or "")
    if config.resume == "never" and any((directory / name).exists() for name in HOLDS_A_RUN):
        raise UserError(
            f"resume=never, but {directory} holds a run; give another directory, as in output_dir={directory}-2"
        )
    summary = finished(directory)
    if summary is None and not any(directory.glob("checkpoints/step-*")):
        # it failed before its first checkpoint: nothing is lost by another attempt
        return None
    differences = compare(saved_config(directory), dataclasses.asdict(config))
    refused = differences.keys() - CHANGEABLE - ({*LENGTHS} if config.resume == "extend" else set())
    if refused:
        lines = "\n".join(f"  - {name}: {differences[name]}" for name in sorted(refused))
        longer = "resume=extend goes on to another length. " if refused <= {*LENGTHS} else ""
        raise UserError(
            f"{directory} holds a run with another configuration:\n{lines}\n"
            f"{longer}Give the same settings to resume it, or another directory, as in output_dir={directory}-2; there "
            f"fork_from={directory} goes on from its state, and import_from={directory} starts with its weights"
        )
    if differences.keys() & {*LENGTHS}:
        return None
    lost_its_last = (
        config.resume == "retrain" and summary is not None and not has_checkpoint(directory, summary["steps"])
    )
    return None if lost_its_last else summary


def finished(directory: Path) -> dict[str, Any] | None:
    """The summary of a complete run, else None. Raises UserError where it cannot be read."""
    path = directory / SUMMARY
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); remove it, and the same command writes it anew") from None
