"""The configuration that a run directory holds, and how another one differs from it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from depthlm.config.resolve import is_silent
from depthlm.config.schema import Config, Model
from depthlm.config.schema.sources import type_sources
from depthlm.config.validate.explain import one_line
from depthlm.errors import UserError

FILE = "config.yaml"
# modules of mechanisms that older runs name, and where their classes are now
MOVED = {"depthlm.model.connections.cross_attention.": "depthlm.model.connections.deep_cross_attention."}


def saved_config(directory: Path) -> dict[str, Any]:
    """The configuration of the run in a directory, as plain data. Raises UserError where it cannot be read."""
    try:
        saved = OmegaConf.to_container(OmegaConf.load(directory / FILE))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise UserError(f"{directory} holds a run whose config.yaml cannot be read ({error})") from None
    if not saved or not isinstance(saved, dict):
        raise UserError(f"{directory} holds a run whose config.yaml cannot be read (it has no keys)")
    model = saved.get("model")
    connection = model.get("connection") if isinstance(model, dict) else None
    if isinstance(connection, dict) and isinstance(connection.get("_target_"), str):
        for old, new in MOVED.items():
            connection["_target_"] = connection["_target_"].replace(old, new)
    return saved  # type: ignore[return-value]


def load_config(directory: Path) -> Config:
    """The resolved configuration of a run directory. Raises UserError where there is none."""
    path = directory / FILE
    if not path.is_file():
        raise UserError(f"{directory}: no run in it (config.yaml is missing)")
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), saved_config(directory)))
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: not the configuration of a run of this version ({one_line(error)})") from None
    assert isinstance(config, Config)
    type_sources(config.data)
    return config


def targets(model: Model) -> dict[str, str]:
    """The classes that a mechanism is built of, by part."""
    return {"connection": str(model.connection.get("_target_")), "attention": str(model.attention.get("_target_"))}


def check_trusted(saved: Mapping[str, str], trust: Sequence[str], where: str) -> None:
    """Raise UserError where a class of a saved configuration is neither depthlm's nor of a module in `trust`.

    Importing a module runs it, and who wrote the file may have named any. saved: as `targets` gives them.
    """
    for part, target in saved.items():
        module = target.rpartition(".")[0]
        if not any(module == name or module.startswith(f"{name}.") for name in ("depthlm", *trust)):
            raise UserError(f"{where}: model.{part} is from {module}; name that module in trust=[...] to import it")


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
