"""Access to Hydra's compose API over conf/: its groups, what they compose to, and values as overrides spell them."""

import argparse
import functools
import itertools
import pickle
import re
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.singleton import Singleton
from omegaconf import DictConfig, OmegaConf

from depthlm.config.keys import FREE_GROUPS, NAMED, declaration, is_text, override_text
from depthlm.config.schema import Config
from depthlm.counts import SCALES, Count
from depthlm.files import read_bytes
from depthlm.locations import CONF

ConfigStore.instance().store(name="schema", node=asdict(Config()))


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
    """Return the configuration that Hydra composes, unchecked. Call it only inside `hydra_at_conf`.

    Each choice of groups is composed once per process: a sweep may have hundreds of points that differ in keys alone.
    Raises HydraException or OmegaConfBaseException.
    """
    parsed = OverridesParser.create().parse_overrides(open_names(overrides))
    folder = None if config_dir is None else Path(config_dir).resolve()
    files = state_of_files(folder)
    options = _options(folder, files)
    groups = [override for override in parsed if _is_composed(override, options)]
    raw = pickle.loads(_compose_groups(tuple(str(override.input_line) for override in groups), folder, files))
    apply_values(raw, [override for override in parsed if override not in groups])
    return raw


def apply_values(raw: DictConfig, overrides: list[Override]) -> None:
    """Set keys of a composed configuration, in place. Raises HydraException or OmegaConfBaseException."""
    ConfigLoaderImpl._apply_overrides_to_config(overrides, raw)
    keep_text(raw, overrides)


def config_dir_of(hydra_settings: Any) -> str | None:
    """Return the folder of `--config-dir`. hydra_settings: Hydra's own configuration, inside its main function."""
    sources = hydra_settings.runtime.config_sources
    return next((source.path for source in sources if source.provider == "command-line"), None)


def flags_parser() -> argparse.ArgumentParser:
    """Return Hydra's parser of the flags and overrides of a command line."""
    return get_args_parser()


def open_names(overrides: Sequence[str], settings: bool = False) -> list[str]:
    """Return the overrides, with `++` added for named sources so that Hydra accepts new names and keys.

    settings: also add it for the settings of a class, since a sweep may set one that the default class lacks.
    """
    prefixes = tuple(f"{group}{end}" for group in NAMED for end in (".", "="))
    prefixes += tuple(f"{group}." for group in FREE_GROUPS) if settings else ()
    return [f"++{override}" if override.startswith(prefixes) else override for override in overrides]


def keep_text(raw: DictConfig, overrides: Sequence[Override]) -> None:
    """Write, in place, each text as it was given: Hydra reads 2024_01_15 as a number, which would become 20240115."""
    for override in overrides:
        name = override.key_or_group
        if is_text(name) and isinstance(override.value(), int | float):
            OmegaConf.update(raw, name, (override.input_line or "").partition("=")[2].strip())


def _is_composed(override: Override, groups: Set[str]) -> bool:
    """Return whether Hydra must see an override while it composes: it chooses an option, or Hydra refuses it."""
    name = override.key_or_group
    if "/" in name or name.startswith("hydra") or override.package is not None or override.is_sweep_override():
        return True
    return name in groups and not isinstance(override.value(), dict)


# files: with their times, so that a file that changes is read again
Files = tuple[tuple[str, int, int], ...]


def state_of_files(folder: str | Path | None) -> Files:
    """Return the configuration files of a folder with their times and sizes."""
    if folder is None:
        return ()
    states = ((str(file), file.stat()) for file in sorted(Path(folder).rglob("*.yaml")) if file.is_file())
    return tuple((name, state.st_mtime_ns, state.st_size) for name, state in states)


@functools.lru_cache(maxsize=64)
def _options(folder: Path | None, files: Files) -> Set[str]:
    return available_groups(folder).keys()


@functools.lru_cache(maxsize=1024)
def _compose_groups(overrides: tuple[str, ...], folder: Path | None, files: Files) -> bytes:
    path = [] if folder is None else [f"hydra.searchpath=['file://{folder}']"]
    # unpickling takes half the time of a deep copy
    return pickle.dumps(hydra.compose("config", [*overrides, *path]))


def ignored_files(config_dir: str | Path) -> list[Path]:
    """Return the files of an additional folder that Hydra does not read, since conf/ has another one of the name."""
    files = (file for file in sorted(Path(config_dir).rglob("*.yaml")) if file.is_file())
    pairs = ((file, CONF / file.relative_to(config_dir)) for file in files)
    return [file for file, own in pairs if own.is_file() and own.read_bytes() != read_bytes(file)]


def available_groups(config_dir: str | Path | None) -> dict[str, list[str]]:
    """Return every configuration group with its options, including those of config_dir."""
    folders = [CONF] if config_dir is None else [CONF, Path(config_dir)]
    options_by_group: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.rglob("*.yaml"):
            group, _, option = file.relative_to(folder).with_suffix("").as_posix().rpartition("/")
            root, _, rest = group.partition("/")
            if root == "experiment":
                # each paper has a folder; all their files are options of one group
                group, option = root, f"{rest}/{option}".lstrip("/")
            if group and root != "hydra" and not file.stem.startswith("_"):
                options_by_group.setdefault(group, set()).add(option)
    return {group: sorted(options) for group, options in sorted(options_by_group.items())}


def comment(file: Path) -> list[str]:
    """Return the lines of the comment at the top of a configuration file."""
    lines = (line for line in file.read_text().splitlines() if not line.startswith("# @package"))
    return [line.removeprefix("#").strip() for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]


def value_text(name: str, value: Any) -> str:
    """Return the value of a key as an override that Hydra reads back as the same value, counts as 10B."""
    if isinstance(value, list):
        return f"[{','.join(value_text(name, element) for element in value)}]"
    if isinstance(value, str) and not re.fullmatch(r"(?!(true|false|null|nan|inf)$)[a-z_./][\w./:@+-]*", value, re.I):
        # without quotes it would be a number, or no value at all
        return "'" + value.replace("'", r"\'") + "'"
    key = declaration(name)
    if key is not None and key.plain_type is Count and type(value) is int and value:
        unit, scale = next((item for item in reversed(SCALES.items()) if value % item[1] == 0), ("", 1))
        return f"{value // scale}{unit}"
    return override_text(value)
