"""Compose command-line overrides into a checked, resolved `Config`."""

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from depthlm.config.classes import classes_of, code_digests
from depthlm.config.from_run import (
    MOMENTARY,
    Sources,
    check_classes,
    compose_on,
    place_derived,
    read_sources,
    refuse_protocol,
)
from depthlm.config.hydra_context import Files, compose_raw, hydra_at_conf, ignored_files, keep_text, state_of_files
from depthlm.config.keys import check_fields, replace_values
from depthlm.config.names import given_names
from depthlm.config.resolve import COMPOSING, resolve, resolve_saved
from depthlm.config.saved import check_reach, load_config, read_config
from depthlm.config.schema import Config
from depthlm.config.validate.checks import check_together
from depthlm.config.validate.explain import Compose, explain_overrides, is_odd
from depthlm.config.validate.machine import check_machine, check_starts
from depthlm.errors import ConfigError, UserError
from depthlm.locations import CONF
from depthlm.machine import environment
from depthlm.run_directory import RunDirectory


def compose(
    overrides: Sequence[str] = (), config_dir: str | Path | None = None, *, here: bool | Literal["data"] = True
) -> Config:
    """Return the configuration of `python train.py <overrides>`, resolved and checked.

    With `run=<directory>`, this is the configuration of that run with the other overrides on top. With `config=<file>`,
    it is that of the file, which may name any class, as the files in config_dir may.

    config_dir: an additional folder of configuration files, as with `--config-dir`.
    here: whether this machine trains it, so that its devices, files and packages are checked, as is a run of somebody
        else, and precision=auto is what the machine computes fast; otherwise precision=auto is bf16. "data": it only
        prepares the data, so of these, only a run of somebody else is checked.

    Raises ConfigError with all mistakes in the overrides; if there are none, with all mistakes across fields. Unless
    here=False, raises UserError for the run of somebody else that names paths, addresses or services.
    """
    sources = _read(overrides, config_dir)
    config, saved = _compose_sources(sources)
    if here and saved is not None and sources.run is not None:
        # what the overrides set is not taken from the run; a mapping is merged into it
        texts = [text for text in sources.overrides if "={" not in text]
        named = tuple(f"{name.replace('/', '.')}." for name in given_names(texts))
        check_reach(sources.run, saved, sources.trust, lambda name: not f"{name}.".startswith(named))
    return _resolve_and_check(config, saved, sources, here)


def compose_unchecked(overrides: Sequence[str], config_dir: str | Path | None = None) -> Config:
    """Return the configuration of overrides whose values are allowed, without the checks across fields.

    precision=auto stays auto. Raises ConfigError if a value is not allowed.
    """
    config = _compose_unchecked(tuple(overrides), config_dir, state_of_files(config_dir))
    # the code of a user may change between two calls
    return replace(config, code=code_digests(classes_of(config)))


@functools.lru_cache(maxsize=4096)
def _compose_unchecked(overrides: tuple[str, ...], config_dir: str | Path | None, files: Files) -> Config:
    # a sweep asks again after each round of its runs
    sources = _read(overrides, config_dir)
    return _resolve(*_compose_sources(sources), sources, lambda config: "auto")


def resolve_and_check(raw: DictConfig, overrides: Sequence[str], config_dir: str | Path | None = None) -> Config:
    """Return a configuration that Hydra composed, resolved and checked for this machine. Raises ConfigError."""
    keep_text(raw, OverridesParser.create().parse_overrides(list(overrides)))
    config, errors = check_fields(raw)
    if config is None:
        raise ConfigError(errors)
    return _resolve_and_check(config, None, Sources(list(overrides), config_dir=config_dir), here=True)


def mechanisms(config_dir: str | Path | None = None) -> list[str]:
    """Return the allowed values of `model=`: the presets in conf/model and in config_dir."""
    folders = [CONF] if config_dir is None else [CONF, Path(config_dir)]
    return sorted({path.stem for folder in folders for path in (folder / "model").glob("*.yaml")})


def _read(overrides: Sequence[str], config_dir: str | Path | None) -> Sources:
    if isinstance(overrides, str):
        raise ConfigError([f"overrides={overrides!r}: must be a list, as in {overrides.split()}"])
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError([f"config_dir={config_dir}: no such folder"])
    if config_dir is not None and (hidden := ignored_files(config_dir)):
        raise ConfigError(
            [f"{file}: depthlm has a file of this name, which Hydra reads instead; rename it" for file in hidden]
        )
    return read_sources(overrides, config_dir)


def _compose_sources(sources: Sources) -> tuple[Config, Config | None]:
    """Return the configuration that the sources compose, and the resolved one that `run=` or `config=` gives."""
    texts, config_dir = sources.overrides, sources.config_dir
    saved: Config | None = None
    compose_texts: Compose = compose_raw
    refused: dict[str, str] = {}
    if sources.file is not None:
        saved = read_config(sources.file, str(sources.file))
        compose_texts = functools.partial(compose_on, saved, lambda named: None)
    elif sources.run is not None:
        saved, refused = load_config(sources.run), refuse_protocol(texts)
        check = functools.partial(check_classes, sources.run, saved, sources.trust)
        compose_texts = functools.partial(compose_on, replace_values(saved, MOMENTARY), check)
    with hydra_at_conf():
        config: Config | None = None
        errors: list[str] = []
        with suppress(*COMPOSING):
            config, errors = check_fields(compose_texts(texts, config_dir))
        if config is None or refused or any(map(is_odd, texts)):
            allowed = [text for text in texts if text not in refused]
            errors = [*refused.values(), *explain_overrides(allowed, config_dir, compose_texts)] or errors
    if config is None or errors:
        raise ConfigError(errors)
    return config, saved if sources.file is None else config


def _resolve(config: Config, saved: Config | None, sources: Sources, fast_precision: Callable[[Config], str]) -> Config:
    texts, config_dir = sources.overrides, sources.config_dir
    if saved is None:
        config = resolve(config, texts, config_dir)
    else:
        config = resolve_saved(config, saved, texts, config_dir)
    if config.precision.name == "auto":
        config = replace_values(config, {"precision.name": fast_precision(config)})
    return config if sources.run is None or saved is None else place_derived(sources.run, saved, config, texts)


def _choose_precision(config: Config, is_placed: bool) -> str:
    """Return the precision for `auto`. is_placed: output_dir is that of the run, not of the run that it follows."""
    run = RunDirectory.of(config.output_dir)
    # with a checkpoint, a run keeps its precision on another device
    if is_placed and os.path.exists(run.saved):
        with suppress(UserError, OSError):
            saved = load_config(run.path)
            if saved.precision.name in ("bf16", "fp32"):
                return saved.precision.name
    return environment.fast_precision(environment.device_type(config.device), config.size.hidden_size)


def _resolve_and_check(config: Config, saved: Config | None, sources: Sources, here: bool | Literal["data"]) -> Config:
    points = [point for point in config.experiment.points if isinstance(point, dict)]
    # the keys whose value is another point of the experiment
    starts = {str(name) for point in points for name, value in point.items() if str(value).startswith("@")}
    fast_precision = (
        functools.partial(_choose_precision, is_placed=sources.run is None) if here is True else lambda config: "bf16"
    )
    config = _resolve(config, saved, sources, fast_precision)
    errors = check_together(config, given_names(sources.overrides))
    if here is True:
        errors += [*check_machine(config), *check_starts(config, starts)]
    if errors:
        raise ConfigError(errors)
    return config
