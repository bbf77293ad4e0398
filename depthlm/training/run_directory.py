"""The run directory: what it holds, and whether this configuration may go on in it."""

import dataclasses
import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from omegaconf import OmegaConf
from yaml import YAMLError

from depthlm import environment
from depthlm.config import Config
from depthlm.config.resolve import is_silent
from depthlm.environment import Ranks
from depthlm.errors import UserError
from depthlm.files import replace_text

LOCK_SECONDS = 10.0
HOLDS_A_RUN = ("config.yaml", "checkpoints", "metrics.jsonl", "summary.json")


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


def check_run_directory(config: Config) -> Path:
    """The run directory of a configuration. Raises UserError where this configuration may not go on in it."""
    directory = Path(config.output_dir or "")
    if config.resume == "never" and any((directory / name).exists() for name in HOLDS_A_RUN):
        raise UserError(
            f"resume=never, but {directory} holds a run; give another directory, as in output_dir={directory}-2"
        )
    if finished(directory) is None and not any(directory.glob("checkpoints/step-*")):
        # it failed before its first checkpoint: nothing is lost by another attempt
        return directory
    saved = saved_config(directory)
    differences = compare(saved, dataclasses.asdict(config))
    if differences:
        lines = "\n".join(f"  - {line}" for line in differences)
        stages = {saved.get("deepspeed", {}).get("stage"), config.deepspeed.stage}
        reason = "DeepSpeed cannot bring an optimizer to ZeRO 3, or back. " if len(stages) == 2 and 3 in stages else ""
        raise UserError(
            f"{directory} holds a run with another configuration:\n{lines}\n"
            f"{reason}Give the same settings to resume it, or another directory, as in output_dir={directory}-2; "
            f"import_from={directory} starts a run there with these weights"
        )
    return directory


def saved_config(directory: Path) -> Any:
    """The configuration of the run in a directory, as plain data. Raises UserError where it cannot be read."""
    try:
        saved = OmegaConf.to_container(OmegaConf.load(directory / "config.yaml"))
    except (OSError, YAMLError) as error:
        raise UserError(f"{directory} holds a run whose config.yaml cannot be read ({error})") from None
    if not saved:
        raise UserError(f"{directory} holds a run whose config.yaml cannot be read (it is empty)")
    return saved


def compare(saved: Any, now: Any, prefix: str = "") -> list[str]:
    """One line for each key that changes the result and differs."""
    lines: list[str] = []
    for key in sorted({*saved, *now}):
        name = f"{prefix}{key}"
        if is_silent(name):
            continue
        old, new = saved.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines.extend(compare(old, new, f"{name}."))
        elif old != new:
            lines.append(f"{name}: the run has {old}, this command gives {new}")
    return lines


def finished(directory: Path) -> dict[str, Any] | None:
    """The summary of a complete run, else None."""
    path = directory / "summary.json"
    return json.loads(path.read_text()) if path.exists() else None
