"""The command line that prepares the data of a configuration."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from depthlm.config.hydra_context import compose_raw, hydra_at_conf
from depthlm.config.schema import Config
from depthlm.counts import SCALES, parse_count
from depthlm.locations import CONF, command

# keys that do not affect the preparation
_UNUSED = {"num_workers", "shuffle_seed", "fraction", "document_mask", "pad_vocab_multiple"}


def prepare_command(config: Config) -> str:
    """Return the command that prepares `data=<name>`, with every setting that differs from the file of that name."""
    name, config_dir = config.data.name, None
    if HydraConfig.initialized():
        hydra = HydraConfig.get()
        name, config_dir = hydra.runtime.choices.get("data", name), given_config_dir(hydra)
    folders = [CONF] if config_dir is None else [CONF, Path(config_dir)]
    chosen = [f"data={name}"] if any((folder / "data" / f"{name}.yaml").is_file() for folder in folders) else []
    with hydra_at_conf():
        defaults = OmegaConf.to_container(compose_raw(chosen, config_dir).data)
    place = [] if config_dir is None else ["--config-dir", shlex.quote(config_dir)]
    return " ".join(
        [command("data/prepare.py", "prepare"), *place, *chosen, *_differing("data", asdict(config.data), defaults)]
    )


def given_config_dir(hydra: Any) -> str | None:
    """Return the folder given by `--config-dir`, from the `hydra` section of a Hydra application's configuration."""
    folders = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    return folders[0] if folders else None


def _differing(prefix: str, values: dict[str, Any], defaults: Any) -> list[str]:
    words = [shlex.quote(f"~{prefix}.{key}") for key in defaults or () if key not in values]
    for key, value in values.items():
        default = defaults.get(key) if isinstance(defaults, dict) else None
        if isinstance(value, dict):
            words += _differing(f"{prefix}.{key}", value, default)
        elif f"{prefix}.{key}".removeprefix("data.") not in _UNUSED and not _same(value, default):
            words.append(shlex.quote(f"{prefix}.{key}={_spelt(value)}"))
    return words


def _same(value: Any, default: Any) -> bool:
    if isinstance(default, str) and isinstance(value, int):
        return parse_count(default) == value
    return value == default


def _spelt(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        scales = [(suffix, scale) for suffix, scale in SCALES.items() if value and value % scale == 0]
        return f"{value // scales[-1][1]}{scales[-1][0]}" if scales else str(value)
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)
