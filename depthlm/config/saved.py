"""The saved configuration of a run directory, and its differences from another configuration."""

import dataclasses
import functools
import hmac
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from depthlm.config.renamed import use_new_names
from depthlm.config.schema import Config
from depthlm.config.schema.keys import FREE_GROUPS, flatten, keys, on_resume, plain, validate
from depthlm.config.schema.sources import type_sources
from depthlm.config.trust import check_outside, outside_settings, signature
from depthlm.config.validate.explain import one_line
from depthlm.errors import UserError
from depthlm.files import DEEPEST, read_text
from depthlm.run_directory import RunDirectory

SIGNED = "# signed: "


class Loader(get_yaml_loader()):  # type: ignore[misc]
    """OmegaConf's loader of YAML, which alone leaves interpolations as text.

    It refuses aliases: a few lines with them can expand to more than fits in memory, and depthlm writes none. It also
    refuses what is nested deeper than DEEPEST.
    """

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node. Raises ComposerError for an alias, and for one that is too deep."""
        if self.check_event(yaml.AliasEvent) or self.depth > DEEPEST:
            what = "nested too deep" if self.depth > DEEPEST else "an alias"
            raise yaml.composer.ComposerError(None, None, what, self.peek_event().start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def config_text(config: Config) -> str:
    """Return a configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def signed_config_text(config: Config) -> str:
    """Return a configuration as config.yaml contains it, with the user's signature in the first line."""
    text = config_text(config)
    signed = signature(text)
    return text if signed is None else f"{SIGNED}{signed}\n{text}"


def is_own(directory: Path) -> bool:
    """Return whether this user has trained the run in a directory: its config.yaml has the user's signature."""
    try:
        text = read_text(RunDirectory(directory).config)
    except (OSError, ValueError):
        return False
    head, _, rest = text.partition("\n")
    wanted, given = signature(rest), head.partition(SIGNED)[2]
    return wanted is not None and hmac.compare_digest(given.encode(), wanted.encode())


def check_reach(directory: Path, config: Config, trust: Sequence[str], needed: Callable[[str], bool]) -> None:
    """Raise UserError if the saved configuration of somebody else's run names paths, addresses or services.

    needed: whether the command takes a setting from the run.
    """
    if not is_own(directory):
        settings = {name: value for name, value in outside_settings(config).items() if needed(name)}
        check_outside(settings, trust, str(directory))


def saved_config(directory: Path) -> dict[str, Any]:
    """Return the configuration saved in a run directory, as plain data: nothing in it is interpolated.

    Raises UserError if it cannot be read.
    """
    path = RunDirectory(directory).config
    try:
        saved = yaml.load(read_text(path), Loader=Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{directory} holds a run whose config.yaml cannot be read ({error})") from None
    if not saved or not isinstance(saved, dict):
        raise UserError(f"{directory} holds a run whose config.yaml cannot be read (it has no keys)")
    use_new_names(saved)
    return saved


def as_text(value: Any) -> Any:
    """Return plain data for OmegaConf in which interpolations such as ${oc.env:HOME} are text."""
    if isinstance(value, dict):
        return {key: as_text(one) for key, one in value.items()}
    if isinstance(value, list):
        return [as_text(one) for one in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def load_config(directory: Path) -> Config:
    """Return the resolved configuration saved in a run directory. Raises UserError if there is none, or a wrong one."""
    path = RunDirectory(directory).config
    if not path.is_file():
        raise UserError(f"{directory}: no run in it (config.yaml is missing)")
    try:
        merged = OmegaConf.merge(_schema(), as_text(saved_config(directory)))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: not the configuration of a run of this version ({one_line(error)})") from None
    assert isinstance(config, Config)
    values = {name: plain(OmegaConf.select(merged, name)) for name in keys() if name not in FREE_GROUPS}
    _, wrong = validate(Config, values)
    if wrong:
        errors = [f"{name}={values[name]}: must be {keys()[name].wanted}" for name in sorted(wrong)]
        raise UserError(f"{path}: {'; '.join(errors)}")
    type_sources(config.data)
    return config


@functools.cache
def _schema() -> DictConfig:
    return OmegaConf.structured(Config)


def compare(saved: Any, now: Any, prefix: str = "") -> dict[str, str]:
    """Return the keys that differ and may affect the result, each with a description of both values.

    A run of an older version lacks newer keys, whose defaults must have the effect that it had without them.
    """
    differences: dict[str, str] = {}
    for key in sorted({*saved, *now}):
        name = f"{prefix}{key}"
        if on_resume(name) == "free":
            continue
        new = now.get(key)
        old = saved[key] if key in saved else _default(name, now)
        if isinstance(old, dict) and isinstance(new, dict):
            differences |= compare(old, new, f"{name}.")
        elif old != new:
            differences[name] = f"the run has {old}, this command gives {new}"
    return differences


def _default(name: str, settings: Mapping[str, Any]) -> Any:
    """Return the default of a key; settings: those of its group."""
    group, _, key = name.rpartition(".")
    if group in ("model.connection", "model.attention") and "_target_" in settings:
        parameter = inspect.signature(get_class(settings["_target_"])).parameters.get(key)
        return None if parameter is None or parameter.default is parameter.empty else parameter.default
    return _defaults().get(name)


@functools.cache
def _defaults() -> dict[str, Any]:
    return flatten(dataclasses.asdict(Config()))
