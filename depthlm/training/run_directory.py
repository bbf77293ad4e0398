"""The run directory: what it holds, and whether this configuration may go on in it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from depthlm import environment
from depthlm.config import Config
from depthlm.config.resolve import is_silent
from depthlm.errors import UserError


def open_run_directory(config: Config) -> Path:
    """Create the run directory, or check that the run in it is this one, and write its config and environment.

    Raises UserError where it holds another run, or any run under resume=never.
    """
    directory = check_run_directory(config)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output_dir={directory}: cannot be made ({error})") from None
    OmegaConf.save(OmegaConf.structured(config), directory / "config.yaml")
    (directory / "environment.json").write_text(json.dumps(environment.describe(), indent=1) + "\n")
    return directory


def check_run_directory(config: Config) -> Path:
    """The run directory of a configuration. Raises UserError where this configuration may not go on in it."""
    directory = Path(config.output_dir or "")
    saved = directory / "config.yaml"
    if not saved.exists():
        return directory
    if config.resume == "never":
        raise UserError(
            f"resume=never, but {directory} holds a run; give another directory, as in output_dir={directory}-2"
        )
    differences = compare(OmegaConf.to_container(OmegaConf.load(saved)), dataclasses.asdict(config))
    if differences:
        lines = "\n".join(f"  - {line}" for line in differences)
        raise UserError(
            f"{directory} holds a run with another configuration:\n{lines}\n"
            f"Give the same settings to resume it, or another directory, as in output_dir={directory}-2"
        )
    return directory


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
