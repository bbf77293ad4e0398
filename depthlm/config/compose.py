"""Compose command-line overrides into a checked, resolved `Config`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from depthlm.config.errors import ConfigError
from depthlm.config.from_run import check_origin, directory_of, keeps_mechanism, own_overrides, raw_from_run, run_of
from depthlm.config.hydra_context import compose_raw, hydra_at_conf, keep_text
from depthlm.config.keys import replaced
from depthlm.config.resolve import resolve, resolve_saved
from depthlm.config.saved import load_config
from depthlm.config.schema import Config
from depthlm.config.validate.checks import check_together
from depthlm.config.validate.explain import explain_overrides, is_odd
from depthlm.config.validate.fields import check_fields
from depthlm.config.validate.machine import check_machine, check_starts
from depthlm.locations import CONF
from depthlm.machine import environment


def compose(overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> Config:
    """Return the configuration of `python train.py <overrides>`, resolved and checked for this machine.

    With `run=<directory>`, this is the configuration of that run with the other overrides on top.

    config_dir: an additional folder of configuration files, as with `--config-dir`.

    Raises ConfigError with all mistakes in the overrides; if there are none, with all mistakes across fields. Raises
    UserError for the run of somebody else that names paths, addresses or services.
    """
    raw, saved = _composed(overrides, config_dir)
    run = run_of(overrides)
    if run is not None and saved is not None:
        check_origin(run, saved, overrides)
    return resolve_and_check(raw, overrides, saved)


def compose_anywhere(overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> Config:
    """Return the configuration that `compose` returns on a machine that has the devices, files and packages it names.

    precision=auto is bf16.
    """
    raw, saved = _composed(overrides, config_dir)
    resolved = _resolved(raw, overrides, saved, lambda config: "bf16")
    return _without(check_together(resolved.config, resolved.given), resolved.config)


def resolve_and_check(raw: DictConfig, overrides: Sequence[str], saved: Config | None = None) -> Config:
    """Return a composed configuration, resolved and checked for this machine. Raises ConfigError.

    saved: the configuration of the run that `run=` names.
    """
    config, given, starts = _resolved(raw, overrides, saved, _fast_precision)
    return _without([*check_together(config, given), *check_machine(config), *check_starts(config, starts)], config)


def mechanisms(config_dir: str | Path | None = None) -> list[str]:
    """Return the allowed values of `model=`: the presets in conf/model and in config_dir."""
    folders = [CONF] if config_dir is None else [CONF, Path(config_dir)]
    return sorted({path.stem for folder in folders for path in (folder / "model").glob("*.yaml")})


class _Resolved(NamedTuple):
    """A configuration, the keys that the overrides set, and those whose value is another point of the experiment."""

    config: Config
    given: set[str]
    starts: set[str]


def _composed(overrides: Sequence[str], config_dir: str | Path | None) -> tuple[DictConfig, Config | None]:
    """Return the configuration that the overrides compose, and the saved one of the run that `run=` names."""
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError([f"config_dir={config_dir}: no such folder"])
    run = run_of(overrides)
    if run is not None:
        saved = load_config(run)
        return raw_from_run(run, saved, overrides, config_dir), saved
    with hydra_at_conf():
        try:
            raw = compose_raw(overrides, config_dir)
            mistaken = bool(check_fields(raw)[1]) or any(map(is_odd, overrides))
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError):
            mistaken = True
        if mistaken and (errors := explain_overrides(overrides, config_dir, compose_raw)):
            raise ConfigError(errors)
    return raw, None


def _resolved(
    raw: DictConfig, overrides: Sequence[str], saved: Config | None, fast_precision: Callable[[Config], str]
) -> _Resolved:
    run, own = run_of(overrides), own_overrides(overrides)
    parsed = OverridesParser.create().parse_overrides(own)
    given = {override.key_or_group for override in parsed}
    keep_text(raw, parsed)
    config, errors = check_fields(raw)
    if config is None:
        raise ConfigError(errors)
    points = [point for point in config.experiment.points if isinstance(point, dict)]
    starts = {str(name) for point in points for name, value in point.items() if str(value).startswith("@")}
    if saved is not None and keeps_mechanism(saved, config):
        # only another mechanism needs a new name
        given.add("model.name")
    config = resolve(config, given, own) if saved is None else resolve_saved(config, given, own)
    if config.precision.name == "auto":
        config = replaced(config, {"precision.name": fast_precision(config)})
    if run is not None and saved is not None:
        config = replace(config, output_dir=directory_of(run, saved, config, own))
    return _Resolved(config, given, starts)


def _fast_precision(config: Config) -> str:
    return environment.fast_precision(environment.device_type(config.device))


def _without(errors: list[str], config: Config) -> Config:
    if errors:
        raise ConfigError(errors)
    return config
