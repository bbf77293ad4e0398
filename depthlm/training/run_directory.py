"""The run directory: what it holds, and whether this configuration may go on in it."""

import dataclasses
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from omegaconf import OmegaConf
from yaml import YAMLError

from depthlm import environment
from depthlm.config import Config
from depthlm.config.resolve import CHANGEABLE, LENGTHS, is_silent
from depthlm.errors import UserError
from depthlm.files import replace_text
from depthlm.launchers import Ranks

log = logging.getLogger("depthlm")
LOCK_SECONDS = 10.0
SUMMARY = "summary.json"
HOLDS_A_RUN = ("config.yaml", "checkpoints", "metrics.jsonl", SUMMARY)


@contextmanager
def open_run_directory(config: Config, ranks: Ranks) -> Iterator[Path]:
    """Create the run directory, hold it for this process, and write its configuration and environment.

    Raises UserError where that fails, or another process trains in it.
    """
    directory = Path(config.output_dir or "")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output_dir={directory}: cannot be made ({error})") from None
    with (directory / ".lock").open("w") as file:
        _lock(file, directory)
        if (summary := finished(directory)) is not None:
            # the run is being extended: what it came to before stays
            os.replace(directory / SUMMARY, directory / f"summary-step-{summary['steps']:08d}.json")
        replace_text(directory / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))
        (directory / "environment.json").write_text(json.dumps(environment.describe(ranks), indent=1) + "\n")
        yield directory


def _lock(file: TextIO, directory: Path) -> None:
    # the workers of a killed run hold its lock until they notice that it is gone
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{directory}: another process trains in it; wait for it, or give another output_dir="
                ) from None
            time.sleep(0.2)


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
    for name, words in sorted(differences.items()):
        log.info("going on with another setting: %s: %s", name, words)
    return None if differences.keys() & {*LENGTHS} else summary


def saved_config(directory: Path) -> Any:
    """The configuration of the run in a directory, as plain data. Raises UserError where it cannot be read."""
    try:
        saved = OmegaConf.to_container(OmegaConf.load(directory / "config.yaml"))
    except (OSError, YAMLError) as error:
        raise UserError(f"{directory} holds a run whose config.yaml cannot be read ({error})") from None
    if not saved:
        raise UserError(f"{directory} holds a run whose config.yaml cannot be read (it is empty)")
    return saved


def compare(saved: Any, now: Any, prefix: str = "") -> dict[str, str]:
    """The keys that change the result and differ, and both values in words."""
    differences: dict[str, str] = {}
    for key in sorted({*saved, *now}):
        name = f"{prefix}{key}"
        if is_silent(name):
            continue
        old, new = saved.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            differences |= compare(old, new, f"{name}.")
        elif old != new:
            differences[name] = f"the run has {old}, this command gives {new}"
    return differences


def finished(directory: Path) -> dict[str, Any] | None:
    """The summary of a complete run, else None."""
    path = directory / SUMMARY
    return json.loads(path.read_text()) if path.exists() else None
