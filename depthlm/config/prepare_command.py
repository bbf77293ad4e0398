"""The command line that prepares the data of a configuration."""

import shlex
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf

from depthlm.config.hydra_context import compose_raw, hydra_at_conf, value_text
from depthlm.config.schema import Config
from depthlm.counts import parse_count
from depthlm.locations import CONF, command

# keys that do not affect the preparation
_UNUSED = {"num_workers", "shuffle_seed", "fraction", "document_mask", "pad_vocab_multiple"}


def prepare_command(config: Config) -> str:
    """Return the command that prepares `data=<name>`, with every setting that differs from conf/data/<name>.yaml."""
    name = config.data.name
    chosen = [f"data={name}"] if (CONF / "data" / f"{name}.yaml").is_file() else []
    with hydra_at_conf():
        defaults = OmegaConf.to_container(compose_raw(chosen, None).data)
    return " ".join(
        [command("data/prepare.py", "prepare"), *chosen, *_differing("data", asdict(config.data), defaults)]
    )


def _differing(prefix: str, values: dict[str, Any], defaults: Any) -> list[str]:
    words = [shlex.quote(f"~{prefix}.{key}") for key in defaults or () if key not in values]
    for key, value in values.items():
        default = defaults.get(key) if isinstance(defaults, dict) else None
        if isinstance(value, dict):
            words += _differing(f"{prefix}.{key}", value, default)
        elif f"{prefix}.{key}".removeprefix("data.") not in _UNUSED and not _same(value, default):
            words.append(shlex.quote(f"{prefix}.{key}={value_text(f'{prefix}.{key}', value)}"))
    return words


def _same(value: Any, default: Any) -> bool:
    if isinstance(default, str) and isinstance(value, int):
        return parse_count(default) == value
    return value == default
