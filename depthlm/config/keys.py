"""The flat list of a schema's keys, each with its type and documentation, and the validation of their values."""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Optional, TypeVar

from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError

from depthlm.config.classes import check_target
from depthlm.config.schema import Config, Recomputation
from depthlm.counts import Count
from depthlm.data.settings import Source
from depthlm.errors import join_names, nearest
from depthlm.fields import OnResume

# the types of keys in error messages
WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    Count: "a whole number such as 2000000, 300M or 10B",
    Recomputation: "true, false, selective, or a number n above 1, which recomputes every n-th layer",
    list[int]: "a list of integers",
    list[float]: "a list of numbers",
    list[str]: "a list of texts",
}

# the class of a mechanism or of an optimizer defines its settings, so the schema does not list them
FREE_GROUPS = ("model.connection", "model.attention", "optimizer.settings")
# groups of sources whose names the user chooses
NAMED = ("data.sources", "data.validation")
# the keys that identify the text of a source
TEXT = {"source", "hub", "path", "subset", "files"}

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Key:
    """A leaf of the schema. metadata: the arguments of `depthlm.fields.key`, by pydantic's names."""

    name: str
    type: Any
    metadata: Mapping[str, Any]

    @property
    def doc(self) -> str:
        """The meaning of the key."""
        return self.metadata["description"]

    @property
    def optional(self) -> bool:
        """Whether null is allowed."""
        return types.NoneType in typing.get_args(self.type)

    @property
    def plain_type(self) -> Any:
        """The type without null."""
        inner = [member for member in typing.get_args(self.type) if member is not types.NoneType]
        return inner[0] if self.optional else self.type

    @property
    def is_list(self) -> bool:
        """Whether the value is a list."""
        return typing.get_origin(self.plain_type) is list

    @property
    def is_text(self) -> bool:
        """Whether the value is text, perhaps one of the choices."""
        choices = typing.get_args(self.plain_type) if typing.get_origin(self.plain_type) is Literal else ()
        return self.plain_type is str or (bool(choices) and all(isinstance(value, str) for value in choices))

    @property
    def choices(self) -> list[str]:
        """The allowed values as a user writes them; empty if there is no list of them."""
        literal = typing.get_args(self.plain_type)[0] if self.is_list else self.plain_type
        values = typing.get_args(literal) if typing.get_origin(literal) is Literal else ()
        return [str(value).lower() if isinstance(value, bool) else value for value in values]

    @property
    def wanted(self) -> str:
        """The allowed values, in words."""
        if self.choices:
            return ("a list of one or more of " if self.is_list else "one of ") + ", ".join(self.choices)
        words = WORDS.get(self.plain_type, "a list" if self.is_list else "a group")
        for name, text in (("ge", "at least"), ("gt", "above"), ("le", "at most")):
            if name in self.metadata:
                words += f", {text} {self.metadata[name]}"
        return words + (", or null" if self.optional else "")


@functools.cache
def keys(schema: type = Config) -> dict[str, Key]:
    """Return every key of a schema by its dotted name."""
    return {key.name: key for key in _walk(schema, "", {})}


def validate(schema: type[Settings], values: Mapping[str, Any]) -> tuple[Settings | None, list[tuple[str, ...]]]:
    """Return the values as an instance of a schema, or None and the places of all values that are not allowed."""
    known = keys(schema).values()  # type: ignore[arg-type]
    # pydantic takes true and false for 1 and 0
    flags = [key for key in known if isinstance(value_at(values, key.name), bool)]
    places = [tuple(key.name.split(".")) for key in flags if key.plain_type in (int, float)]
    try:
        settings = _adapter(schema).validate_python(values)  # type: ignore[arg-type]
        return (None if places else settings), places
    except ValidationError as error:
        mistakes = error.errors(include_url=False, include_context=False, include_input=False)
        return None, [*places, *(tuple(map(str, mistake["loc"])) for mistake in mistakes)]


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
    errors = [error for name, value in flatten(values).items() if (error := _explain_unknown(name, value))]
    config, places = validate(Config, values)
    errors += [error for place in places if (error := _mistake(values, place))]
    return config, list(dict.fromkeys(errors))


def replace_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return settings with other values, by dotted name."""
    direct: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, inner = name.partition(".")
        if inner:
            nested.setdefault(section, {})[inner] = value
        else:
            direct[section] = value
    direct |= {section: replace_values(getattr(settings, section), inner) for section, inner in nested.items()}
    return dataclasses.replace(settings, **direct)  # type: ignore[type-var]


def value_of(settings: Any, name: str) -> Any:
    """Return the value of a key by its dotted name."""
    return functools.reduce(getattr, name.split("."), settings)


def value_at(values: Mapping[str, Any], name: str) -> Any:
    """Return the value under a dotted name in nested values, None if there is none."""
    inner: Any = values
    for part in name.split("."):
        inner = inner.get(part) if isinstance(inner, dict) else None
    return inner


def declaration(name: str) -> Key | None:
    """Return the key of a setting; a named source has the keys of `Source`."""
    if name in keys():
        return keys()[name]
    return keys(Source).get(name.rpartition(".")[2]) if name.startswith(tuple(f"{group}." for group in NAMED)) else None


def is_text(name: str) -> bool:
    """Return whether the value of a setting is text."""
    key = declaration(name)
    return key is not None and key.is_text


def on_resume(name: str) -> OnResume:
    """Return whether a run may resume with another value of a key or group (see `depthlm.fields.key`)."""
    return "free" if name.split(".")[0].split("/")[0] == "hydra" else _find_attribute(name, "on_resume", "fixed")


def in_protocol(name: str) -> bool:
    """Return whether runs that are compared must share the value of a key or group."""
    return on_resume(name) == "fixed" and _find_attribute(name, "protocol", True)


@functools.cache
def _find_attribute(name: str, attribute: str, default: Any) -> Any:
    """Return an attribute of a key; of a group, such as tracker, if its keys share it; or of a name inside a group."""
    # the configuration of a run holds its base size as it holds its size
    name = name.replace("parametrization.base_size.", "size.")
    if name in keys():
        return keys()[name].metadata[attribute]
    values = {key.metadata[attribute] for other, key in keys().items() if other.startswith(f"{name}.")}
    parent = name.rpartition(".")[0]
    return values.pop() if len(values) == 1 else _find_attribute(parent, attribute, default) if parent else default


def flatten(settings: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted name; lists and empty groups are values."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def override_text(value: Any) -> str:
    """Return a value in the syntax of an override."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"[{','.join(map(override_text, value))}]" if isinstance(value, list) else str(value)


def split_list(text: str) -> list[str]:
    """Split the text of a command's argument, `a,b` or `[a,b]`."""
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return [part.strip() for part in inside.split(",") if part.strip()]


def _explain_unknown(name: str, value: Any) -> str | None:
    known = keys()
    if name in known or any(name.startswith(f"{key}.") for key in known):
        return None
    if inside := [key for key in known if key.startswith(f"{name}.")]:
        return f"{name}={override_text(value)}: a group of keys; set one of {join_names(inside)}"
    return f"{name}={override_text(value)}: no such key{nearest(name, known)}"


def _mistake(values: Mapping[str, Any], place: tuple[str, ...]) -> str | None:
    """Return the mistake at a place of nested values; None for an unknown key, which `_explain_unknown` reports."""
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
    shown = override_text(value_at(values, name))
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


def _walk(schema: type, prefix: str, inherited: Mapping[str, Any]) -> Iterator[Key]:
    hints = typing.get_type_hints(schema, include_extras=True)
    for entry in dataclasses.fields(schema):
        metadata = {**entry.metadata, **inherited}
        if dataclasses.is_dataclass(hints[entry.name]):
            yield from _walk(hints[entry.name], f"{prefix}{entry.name}.", metadata)
        else:
            yield Key(prefix + entry.name, hints[entry.name], metadata)


@functools.cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    config = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)
    # pydantic takes a configuration beside a dataclass only if the type is a union
    return TypeAdapter(Optional[schema], config=config)  # noqa: UP045
