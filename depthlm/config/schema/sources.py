"""The named sources of a mixture and the named validation sets: groups of keys whose names the user chooses."""

from collections.abc import Callable, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from depthlm.config.schema import Data, Source
from depthlm.config.schema.keys import FREE_GROUPS, Key, walk
from depthlm.config.validate.errors import nearest

NAMED = ("data.sources", "data.validation")

# the keys that identify the text of a source
OWN = {"source", "hub", "path", "subset", "files"}


def open_names(overrides: Sequence[str], settings: bool = False) -> list[str]:
    """Return the overrides, with `++` added for named sources so that Hydra accepts new names and keys.

    settings: also add it for the settings of a class, since a sweep may set one that the default class lacks.
    """
    begins = tuple(f"{group}{end}" for group in NAMED for end in (".", "="))
    begins += tuple(f"{group}." for group in FREE_GROUPS) if settings else ()
    return [f"++{override}" if override.startswith(begins) else override for override in overrides]


def check_sources(raw: DictConfig, fits: Callable[[Key, Any], bool]) -> list[str]:
    """Return the mistakes in the named sources: unknown keys, and values that a key does not allow."""
    errors = []
    for group in NAMED:
        for name, entry in (OmegaConf.select(raw, group) or {}).items():
            if not isinstance(entry, DictConfig):
                errors.append(f"{group}.{name}={entry}: must be a group, as in {group}.{name}.source=<a folder>")
                continue
            if not OWN & entry.keys() and not OmegaConf.select(raw, "data.path"):
                others = [other for other in OmegaConf.select(raw, group) if other != name]
                what = f"has no text; give one of {', '.join(sorted(OWN))}"
                errors.append(f"{group}.{name}: {what}{nearest(str(name), others)}")
            known = {key.name.rsplit(".", 1)[1]: key for key in walk(Source, f"{group}.{name}.")}
            for key, value in entry.items():
                text = f"{group}.{name}.{key!s}={value}"
                if key not in known:
                    errors.append(f"{text}: no such key{nearest(str(key), known)}")
                elif not _is_valid(known[str(key)], str(key), value, fits):
                    errors.append(f"{text}: must be {known[str(key)].wanted}")
    return errors


def _is_valid(key: Key, name: str, value: Any, fits: Callable[[Key, Any], bool]) -> bool:
    try:
        return fits(key, OmegaConf.select(OmegaConf.merge(OmegaConf.structured(Source), {name: value}), name))
    except OmegaConfBaseException:
        return False


def type_sources(data: Data) -> None:
    """Convert each named source of checked data to a `Source`, in place."""
    for group in (data.sources, data.validation):
        for name, entry in group.items():
            group[name] = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Source), entry))
