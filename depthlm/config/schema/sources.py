"""The named sources of a mixture and the named validation sets: groups of keys whose names the user chooses."""

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from depthlm.config.schema import Data, Source
from depthlm.config.schema.keys import FREE_GROUPS, keys, plain, validate
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


def check_sources(raw: DictConfig) -> list[str]:
    """Return the mistakes in the named sources: unknown keys, and values that a key does not allow."""
    errors, known = [], keys(Source)
    for group in NAMED:
        for name, entry in (OmegaConf.select(raw, group) or {}).items():
            if not isinstance(entry, DictConfig):
                errors.append(f"{group}.{name}={entry}: must be a group, as in {group}.{name}.source=<a folder>")
                continue
            if not OWN & entry.keys() and not OmegaConf.select(raw, "data.path"):
                others = [other for other in OmegaConf.select(raw, group) if other != name]
                what = f"has no text; give one of {', '.join(sorted(OWN))}"
                errors.append(f"{group}.{name}: {what}{nearest(str(name), others)}")
            values = {str(key): plain(value) for key, value in entry.items()}
            _, wrong = validate(Source, {key: value for key, value in values.items() if key in known})
            for key, value in values.items():
                if key not in known:
                    errors.append(f"{group}.{name}.{key}={value}: no such key{nearest(key, known)}")
                elif key in wrong:
                    errors.append(f"{group}.{name}.{key}={value}: must be {known[key].wanted}")
    return errors


def type_sources(data: Data) -> None:
    """Convert each named source of checked data to a `Source`, in place."""
    for group in (data.sources, data.validation):
        for name, entry in group.items():
            group[name] = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Source), entry))
