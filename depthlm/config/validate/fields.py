"""Checks of the single fields of a configuration. All mistakes are reported."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from depthlm.config.errors import listed, nearest
from depthlm.config.keys import FREE_GROUPS, NAMED, flatten, keys, override_text, validate, value_at
from depthlm.config.schema import Config
from depthlm.config.validate.mechanism import check_target
from depthlm.data.settings import Source

# the keys that identify the text of a source
TEXT = {"source", "hub", "path", "subset", "files"}


def check_fields(raw: DictConfig) -> tuple[Config | None, list[str]]:
    """Return a composed configuration, validated, or None and the mistakes in single fields.

    Mistakes are unknown keys, values that a key does not allow, settings that a class does not accept, and sources
    without text.
    """
    values: Any = OmegaConf.to_container(raw, resolve=True, throw_on_missing=True)
    errors: list[str] = []
    for name in FREE_GROUPS:
        settings = value_at(values, name)
        # the class of an optimizer is beside its settings
        target = {"_target_": value_at(values, "optimizer._target_")} if name == "optimizer.settings" else {}
        if isinstance(settings, dict):
            errors += check_target(name, {**settings, **target})
    config, mistakes = validate_values(values)
    errors += [*mistakes, *_check_sources(values)]
    return (None if errors else config), errors


def validate_values(values: Mapping[str, Any]) -> tuple[Config | None, list[str]]:
    """Return nested values as a configuration, or None and the keys that are unknown or do not allow their value."""
    errors = [error for name, value in flatten(values).items() if (error := _unknown(name, value))]
    config, places = validate(Config, values)
    errors += [error for place in places if (error := _mistake(values, place))]
    return config, list(dict.fromkeys(errors))


def _unknown(name: str, value: Any) -> str | None:
    known = keys()
    if inside := [key for key in known if key.startswith(f"{name}.")]:
        return f"{name}={override_text(value)}: a group of keys; set one of {listed(inside)}"
    if name in known or any(name.startswith(f"{key}.") for key in known):
        return None
    return f"{name}={override_text(value)}: no such key{nearest(name, known)}"


def _mistake(values: Mapping[str, Any], place: tuple[str, ...]) -> str | None:
    """Return the mistake at a place of nested values; None for an unknown key, which `_unknown` reports."""
    group = ".".join(place[:2])
    if group in NAMED and len(place) > 2:
        source = ".".join(place[:3])
        value = value_at(values, source)
        if len(place) == 3:
            return f"{source}={override_text(value)}: must be a group, as in {source}.source=<a folder>"
        key, known = place[3], keys(Source)
        if key not in known:
            return f"{source}.{key}={override_text(value[key])}: no such key{nearest(key, known)}"
        return f"{source}.{key}={override_text(value[key])}: must be {known[key].wanted}"
    prefixes = (".".join(place[: count + 1]) for count in range(len(place)))
    name = next((prefix for prefix in prefixes if prefix in keys()), None)
    if name is None:
        return None
    declared = keys()[name]
    shown = declared.shown(value_at(values, name))
    return f"{name}={shown}: must be {declared.wanted}{nearest(shown, declared.choices)}"


def _check_sources(values: Mapping[str, Any]) -> list[str]:
    """Return the mistakes of named sources that name no text."""
    errors = []
    for group in NAMED:
        sources = value_at(values, group) or {}
        for name, source in sources.items():
            if isinstance(source, dict) and not TEXT & source.keys() and not value_at(values, "data.path"):
                others = [other for other in sources if other != name]
                what = f"has no text; give one of {', '.join(sorted(TEXT))}"
                errors.append(f"{group}.{name}: {what}{nearest(str(name), others)}")
    return errors
