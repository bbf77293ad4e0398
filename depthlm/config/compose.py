"""From command-line overrides to one checked, resolved `Config`. The only module that asks Hydra to compose."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from depthlm.config.checks import check_fields, check_starts, check_together
from depthlm.config.errors import ConfigError
from depthlm.config.explain import explain_overrides
from depthlm.config.resolve import resolve
from depthlm.config.schema import Config
from depthlm.config.sources import open_names, type_sources
from depthlm.locations import CONF

ConfigStore.instance().store(name="schema", node=Config)


def compose(overrides: Sequence[str] = (), config_dir: str | Path | None = None, here: bool = True) -> Config:
    """The configuration of `python train.py <overrides>`, checked and resolved.

    config_dir: a folder searched for configuration files besides conf/, as `--config-dir` does.
    here: whether it is to run on this machine; if not, devices and files are not asked for, and precision=auto is bf16.
    Raises ConfigError with every mistake in the overrides, or else with every mistake across fields.
    """
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError([f"config_dir={config_dir}: no such folder"])
    with hydra_at_conf():
        try:
            raw = compose_raw(overrides, config_dir)
            mistaken = bool(check_fields(raw))
        except (HydraException, OmegaConfBaseException, ValueError):
            mistaken = True
        if mistaken:
            raise ConfigError(explain_overrides(overrides, config_dir, compose_raw))
    return finish(raw, overrides, here)


def compose_raw(overrides: Sequence[str], config_dir: str | Path | None) -> DictConfig:
    """What Hydra makes of the overrides, unchecked; inside `hydra_at_conf` only."""
    search = [] if config_dir is None else [f"hydra.searchpath=['file://{Path(config_dir).resolve()}']"]
    return hydra.compose("config", [*open_names(overrides), *search])


def mechanisms(config_dir: str | Path | None = None) -> list[str]:
    """What `model=` may be: the presets of conf/model, and of config_dir."""
    folders = [CONF] if config_dir is None else [CONF, Path(config_dir)]
    return sorted({path.stem for folder in folders for path in (folder / "model").glob("*.yaml")})


def finish(raw: DictConfig, overrides: Sequence[str], here: bool = True) -> Config:
    """What Hydra composed from these overrides: typed, resolved and checked across fields. Raises ConfigError."""
    given = {override.key_or_group for override in OverridesParser.create().parse_overrides(list(overrides))}
    config = OmegaConf.to_object(raw)
    assert isinstance(config, Config)
    type_sources(config.data)
    lines = [line for line in config.experiment.points if isinstance(line, dict)]
    starts = {key for line in lines for key, value in line.items() if str(value).startswith("@")}
    resolve(config, given, overrides, here)
    errors = check_together(config, given, here) + (check_starts(config, starts) if here else [])
    if errors:
        raise ConfigError(errors)
    return config


@contextmanager
def hydra_at_conf() -> Iterator[None]:
    """Hydra's compose API over conf/. A caller's own Hydra application is put aside and comes back untouched."""
    outer = Singleton._instances.pop(GlobalHydra, None)
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    finally:
        Singleton._instances.pop(GlobalHydra, None)
        if outer is not None:
            Singleton._instances[GlobalHydra] = outer
