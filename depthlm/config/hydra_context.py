"""Access to Hydra's compose API over conf/, and values in the syntax of its overrides."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from omegaconf import DictConfig

from depthlm.config.schema import Config
from depthlm.config.schema.sources import open_names
from depthlm.locations import CONF

ConfigStore.instance().store(name="schema", node=Config)


@contextmanager
def hydra_at_conf() -> Iterator[None]:
    """Initialize Hydra's compose API over conf/; the global Hydra state of the caller is restored on exit."""
    outer = Singleton._instances.pop(GlobalHydra, None)
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    finally:
        Singleton._instances.pop(GlobalHydra, None)
        if outer is not None:
            Singleton._instances[GlobalHydra] = outer


def compose_raw(overrides: Sequence[str], config_dir: str | Path | None) -> DictConfig:
    """Return the configuration that Hydra composes, unchecked. Call it only inside `hydra_at_conf`."""
    search = [] if config_dir is None else [f"hydra.searchpath=['file://{Path(config_dir).resolve()}']"]
    return hydra.compose("config", [*open_names(overrides), *search])


def override_text(value: Any) -> str:
    """Return a value in the syntax of an override."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"[{','.join(map(override_text, value))}]" if isinstance(value, list) else str(value)
