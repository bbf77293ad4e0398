"""The named sources of a mixture and the named validation sets: groups of keys whose names the reader chooses."""

from collections.abc import Callable, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from depthlm.config.schema import Data, Source
from depthlm.config.schema.keys import Key, walk
from depthlm.config.validate.errors import nearest

NAMED = ("data.sources", "data.validation")

# what tells a source from the others of its mixture
OWN = {"source", "hub", "path", "subset", "files"}


def open_names(overrides: Sequence[str], settings: bool = False) -> list[str]:
    """The overrides, those of named sources made such that Hydra takes names and keys that are new.

    settings: so are a mechanism's, which a sweep may give where the default mechanism has no such setting.
    """
    begins = tuple(f"{group}{end}" for group in NAMED for end in (".", "="))
    begins += ("model.connection.", "model.attention.") if settings else ()
    return [f"++{override}" if override.startswith(begins) else override for override in overrides]


def check_sources(raw: DictConfig, fits: Callable[[Key, Any], bool]) -> list[str]:
    """Every key of every named source: whether there is such a key, and whether its value fits."""
    errors = []
    for group in NAMED:
        for name, entry in (OmegaConf.select(raw, group) or {}).items():
            if not isinstance(entry, DictConfig):
                errors.append(f"{group}.{name}={entry}: must be a group, as in {group}.{name}.source=<a folder>")
                continue
            if not OWN & entry.keys() and not OmegaConf.select(raw, "data.path"):
                others = [other for other in OmegaConf.select(raw, group) if other != name]
                what = f"has no text of its own ({', '.join(sorted(OWN))})"
                errors.append(f"{group}.{name}: {what}{nearest(str(name), others)}")
            known = {key.name.rsplit(".", 1)[1]: key for key in walk(Source, f"{group}.{name}.")}
            for key, value in entry.items():
                given = f"{group}.{name}.{key!s}={value}"
                if key not in known:
                    errors.append(f"{given}: no such key{nearest(str(key), known)}")
                elif not _is_right(known[str(key)], str(key), value, fits):
                    errors.append(f"{given}: must be {known[str(key)].wanted}")
    return errors


def _is_right(key: Key, name: str, value: Any, fits: Callable[[Key, Any], bool]) -> bool:
    try:
        return fits(key, OmegaConf.select(OmegaConf.merge(OmegaConf.structured(Source), {name: value}), name))
    except OmegaConfBaseException:
        return False


def type_sources(data: Data) -> None:
    """Make each named source of checked data a `Source`, in place."""
    for group in (data.sources, data.validation):
        for name, entry in group.items():
            group[name] = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Source), entry))
