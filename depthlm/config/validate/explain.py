"""Explain why overrides do not compose: all mistakes of a command line, each with the allowed values."""

import functools
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from depthlm.config.hydra_context import available_groups, value_text
from depthlm.config.keys import FREE_GROUPS, NAMED, check_fields, flatten, keys
from depthlm.config.names import is_key
from depthlm.errors import join_names, nearest
from depthlm.locations import CONF

# the settings of a class, and the sources of a mixture: keys that the schema does not list
OPEN = tuple(f"{name}." for name in (*FREE_GROUPS, *NAMED))

# the group of which several options may be given
LIST_GROUP = "tracker"

Compose = Callable[[Sequence[str], str | Path | None], DictConfig]


def explain_overrides(overrides: Sequence[str], config_dir: str | Path | None, compose: Compose) -> list[str]:
    """Return one line per mistake. Groups are checked first, then each key alone on top of the valid groups."""
    errors: list[str] = []
    parsed: list[Override] = []
    for text in overrides:
        try:
            parsed.append(OverridesParser.create().parse_override(text))
        except HydraException:
            errors.append(not_an_override(text))
    available = available_groups(config_dir)
    groups: list[str] = []
    values: dict[str, Override] = {}
    for override in parsed:
        name = override.key_or_group
        text = override.input_line or name
        if override.is_delete():
            errors += _refuse_deletion(text, name, available)
        elif (mistake := _mistake_of(override)) is not None:
            errors.append(f"{text}: {mistake}")
        elif name in available:
            value = override.value()
            options = value if isinstance(value, list) and name == LIST_GROUP else [value]
            if all(option in available[name] for option in options) or (value is None and name == "experiment"):
                groups.append(text)
            else:
                errors.append(_no_such_option(text, override, available[name], config_dir))
        else:
            values[text] = override
    # a single override alone is also everything
    attempt = functools.cache(lambda *texts: _try(compose, texts, config_dir))
    composed, failure = attempt(*groups)
    if composed is None:
        return [*errors, *failure]
    base = set(check_fields(composed)[1])
    for text, override in values.items():
        alone, failure = attempt(*groups, text)
        if alone is None:
            errors.append(_explain_value(override, composed, available, failure))
        else:
            errors.extend(error for error in check_fields(alone)[1] if error not in base)
    # keys that a group leaves unset, such as data.source of data=local, unless an override sets them
    everything, failure = attempt(*groups, *values)
    if everything is not None:
        errors.extend(check_fields(everything)[1])
    elif not errors:
        errors.extend(failure)
    return errors


def _mistake_of(override: Override) -> str | None:
    """Return the mistake of an override by itself, whatever its key allows; None if there is none."""
    name = override.key_or_group
    if override.value() == {}:
        return "sets nothing; give the keys inside it, or leave it out"
    if override.is_interval_sweep():
        return f"an interval lists no values; write {name}=a,b, or add hydra/sweeper=optuna"
    if override.is_sweep_override():
        hint = ", or write [a,b] for a list" if is_key(name) or name == LIST_GROUP else ""
        return f"several values; add -m to train each (without run=){hint}"
    if override.is_add() and name in keys():
        return "the key has a value already; leave out the +"
    return None


def _no_such_option(text: str, override: Override, options: Sequence[str], config_dir: str | Path | None) -> str:
    name = override.key_or_group
    # the options that users add most
    often_added = name.startswith(("model", "optimizer")) and config_dir is None
    hint = "; for your own, give --config-dir" if often_added else ""
    return f"{text}: no such {name}; allowed: {join_names(options)}{nearest(str(override.value()), options)}{hint}"


def not_an_override(text: str) -> str:
    """Return the mistake of a text that Hydra cannot parse, with the quoted form if that is what it lacks."""
    key, equals, value = text.partition("=")
    if equals and not set(value) & {*"'\"[{("} and "" in (values := value.split(",")) and any(values):
        return f"{text}: no value beside a comma; write {key}={','.join(filter(None, values))}"
    quoted = f"{key}={value_text(key, value)}"
    try:
        OverridesParser.create().parse_override(quoted)
    except HydraException:
        equals = ""
    if not equals or quoted == text or value[:1] in "'\"[{":
        return f"{text}: not an override; write key=value"
    # in double quotes if the shell changes nothing inside them, which is easier to read
    shell = shlex.quote(quoted) if set(quoted) & {*'"$`\\!'} else f'"{quoted}"'
    return f"{text}: not an override; its value has characters that need quotes: {shell}"


def _try(
    compose: Compose, overrides: Sequence[str], config_dir: str | Path | None
) -> tuple[DictConfig | None, list[str]]:
    try:
        raw = compose(overrides, config_dir)
        check_fields(raw)
        return raw, []
    except MissingMandatoryValue as error:
        return None, [f"{error.full_key}: has no default; give {error.full_key}=..."]
    except InterpolationResolutionError as error:
        return None, [f"{error.full_key}: {str(error).splitlines()[0]}"]
    except yaml.YAMLError as error:
        return None, [_broken_file(error)]
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        return None, [one_line(error)]


def _broken_file(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    where = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}" if mark else "a configuration file"
    return f"{where}: not valid YAML ({problem or ' '.join(str(error).split())})"


def is_odd(text: str) -> bool:
    """Return whether an override that composes is still a mistake: it deletes a key, or sets an empty group.

    Hydra would merge the options of a list.
    """
    if not text.startswith("~") and "{" not in text and "=[" not in text:
        # parsing every override of every point of a sweep would be slow
        return False
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return True
    name, value = override.key_or_group, override.value()
    is_list = isinstance(value, list) and not is_key(name) and name != LIST_GROUP
    return override.is_delete() or (not override.is_sweep_override() and (value == {} or is_list))


def _refuse_deletion(text: str, name: str, groups: Iterable[str]) -> list[str]:
    if name in groups:
        return [f"{text}: every group has an option; choose another by {name}=..."]
    if name in keys():
        return [f"{text}: a key cannot be removed; set it to another value"]
    # sources of a mixture and settings of a class may be deleted
    return [] if name.startswith(OPEN) else [f"{text}: no such key{nearest(name, keys())}"]


def one_line(error: BaseException) -> str:
    """Return the message of a Hydra or OmegaConf error on one line, with the key it concerns."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    key = getattr(cause, "full_key", None)
    if lines and re.match(r"Key '.*' (is )?not in '", lines[0]):
        return f"{key}: no such key"
    # if the first line of a Hydra message ends in a colon, the next line gives the reason
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else next(iter(lines), type(cause).__name__)
    return (f"{key}: " if key else "") + text


def _explain_value(
    override: Override,
    composed: DictConfig,
    groups: dict[str, list[str]],
    failure: list[str],
) -> str:
    name, text = override.key_or_group, override.input_line
    known = keys()
    if name in known:
        if "interpolation" in failure[0].lower():
            return f"{text}: {failure[0].split(': ', 1)[-1]}"
        return f"{text}: must be {known[name].wanted}"
    nested: Any = OmegaConf.to_container(composed, resolve=False)
    present = list(dict.fromkeys([*known, *flatten(nested), *groups]))
    if name in present or name.startswith("hydra"):
        return f"{text}: {failure[0]}"
    if inside := [key for key in known if key.startswith(f"{name}.")]:
        return f"{text}: a group of keys; set one of {join_names(inside)}"
    parent, _, leaf = name.rpartition(".")
    if parent in ("model.connection", "model.attention"):
        inside = [key.removeprefix(f"{parent}.") for key in present if key.startswith(f"{parent}.")]
        settings = [key for key in inside if key != "_target_"]
        return f"{text}: no such key; allowed: {join_names(settings) or 'none'}{nearest(leaf, settings)}"
    return f"{text}: no such key{nearest(name, present)}"


def option_file(group: str, option: str, config_dir: str | Path | None) -> Path:
    """Return the file of an option; a file in config_dir takes precedence over conf/."""
    folders = [CONF] if config_dir is None else [Path(config_dir), CONF]
    return next(file for folder in folders if (file := folder / group / f"{option}.yaml").is_file())
