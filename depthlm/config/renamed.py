"""Names of older versions that are still accepted: of keys, and of modules of mechanisms."""

from typing import Any

from depthlm.config.schema import Config
from depthlm.config.validate.errors import ConfigError

KEYS = {"import_from": "init_from", "training.on_bad_numbers": "training.on_nonfinite"}
MODULES = {"depthlm.model.connections.cross_attention.": "depthlm.model.connections.deep_cross_attention."}


def use_new_keys(config: Config, given: set[str]) -> None:
    """Move, in place, the value of each old key to its new one. Raises ConfigError if both are given."""
    for old, new in KEYS.items():
        section, name = (config.training, "on_bad_numbers") if "." in old else (config, old)
        value = getattr(section, name)
        if value is not None:
            if {old, new} <= given:
                raise ConfigError([f"{old}: the old name of {new}, which is given too; leave out {old}"])
            setattr(section, new.rpartition(".")[2], value)
            setattr(section, name, None)


def use_new_names(saved: dict[str, Any]) -> None:
    """Rename, in place, the keys and modules in the saved configuration of an older version."""
    for old, new in KEYS.items():
        section, name = _section(saved, old), old.rpartition(".")[2]
        if section.get(name) is not None:
            section[new.rpartition(".")[2]], section[name] = section[name], None
    connection = _section(saved, "model.connection._target_")
    for old, new in MODULES.items():
        if str(connection.get("_target_")).startswith(old):
            connection["_target_"] = connection["_target_"].replace(old, new)


def _section(saved: Any, name: str) -> dict[str, Any]:
    """Return the nested dictionary that contains a key, or an empty one if there is none."""
    for part in name.split(".")[:-1]:
        saved = saved.get(part) if isinstance(saved, dict) else None
    return saved if isinstance(saved, dict) else {}
