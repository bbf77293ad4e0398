"""Compose command-line overrides into a checked, resolved `Config`."""

from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from depthlm.config.from_run import directory_of, keeps_mechanism, own_overrides, raw_from_run, run_of
from depthlm.config.hydra_context import compose_raw, hydra_at_conf
from depthlm.config.renamed import KEYS
from depthlm.config.resolve import resolve
from depthlm.config.saved import load_config
from depthlm.config.schema import Config
from depthlm.config.schema.keys import keys
from depthlm.config.schema.sources import type_sources
from depthlm.config.validate.checks import check_fields, check_together
from depthlm.config.validate.errors import ConfigError
from depthlm.config.validate.explain import explain_overrides, is_odd
from depthlm.config.validate.machine import check_starts
from depthlm.locations import CONF


def compose(overrides: Sequence[str] = (), config_dir: str | Path | None = None, here: bool = True) -> Config:
    """Return the configuration of `python train.py <overrides>`, checked and resolved.

    With `run=<directory>`, this is the configuration of that run with the other overrides on top.

    config_dir: an additional folder of configuration files, as with `--config-dir`.
    here: whether the run is for this machine; if not, devices and files are not checked, and precision=auto is bf16.

    Raises ConfigError with all mistakes in the overrides; if there are none, with all mistakes across fields.
    """
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError([f"config_dir={config_dir}: no such folder"])
    run = run_of(overrides)
    if run is not None:
        saved = load_config(run)
        raw = raw_from_run(run, saved, overrides, config_dir, here)
        if errors := check_fields(raw):
            raise ConfigError(errors)
        return resolve_and_check(raw, overrides, here, saved)
    with hydra_at_conf():
        try:
            raw = compose_raw(overrides, config_dir)
            mistaken = bool(check_fields(raw)) or any(map(is_odd, overrides))
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError):
            mistaken = True
        if mistaken and (errors := explain_overrides(overrides, config_dir, compose_raw)):
            raise ConfigError(errors)
    return resolve_and_check(raw, overrides, here)


def mechanisms(config_dir: str | Path | None = None) -> list[str]:
    """Return the allowed values of `model=`: the presets in conf/model and in config_dir."""
    folders = [CONF] if config_dir is None else [CONF, Path(config_dir)]
    return sorted({path.stem for folder in folders for path in (folder / "model").glob("*.yaml")})


def resolve_and_check(
    raw: DictConfig, overrides: Sequence[str], here: bool = True, saved: Config | None = None
) -> Config:
    """Return the composed configuration, typed, resolved and checked across fields. Raises ConfigError.

    saved: the configuration of the run that `run=` names.
    """
    run, own = run_of(overrides), own_overrides(overrides)
    parsed = OverridesParser.create().parse_overrides(own)
    given = {override.key_or_group for override in parsed}
    for override in parsed:
        name = override.key_or_group
        # Hydra reads 2024_01_15 as a number, which as text would be 20240115
        if name in keys() and keys()[name].plain_type is str and isinstance(override.value(), int | float):
            OmegaConf.update(raw, name, (override.input_line or "").partition("=")[2].strip())
    config = OmegaConf.to_object(raw)
    assert isinstance(config, Config)
    type_sources(config.data)
    lines = [line for line in config.experiment.points if isinstance(line, dict)]
    starts = {
        KEYS.get(str(key), str(key)) for line in lines for key, value in line.items() if str(value).startswith("@")
    }
    if saved is not None and keeps_mechanism(saved, config):
        # only another mechanism needs a new name
        given.add("model.name")
    resolve(config, given, own, here, saved=saved is not None)
    if run is not None and saved is not None:
        config.output_dir = directory_of(run, saved, config, own)
    errors = check_together(config, given, here) + (check_starts(config, starts) if here else [])
    if errors:
        raise ConfigError(errors)
    return config
