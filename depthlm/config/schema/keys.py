"""The flat list of the schema's keys, each with its type and documentation, and their validation by pydantic."""

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional

from omegaconf import DictConfig, OmegaConf
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from depthlm.config.schema import Config
from depthlm.config.schema.experiment import Column
from depthlm.counts import parse_count
from depthlm.fields import OnResume

# the types of keys in error messages
WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[int]: "a list of integers",
    list[float]: "a list of numbers",
    list[str]: "a list of texts",
    dict[str, Any]: "a group",
    list[Any]: "a list",
    dict[str, Column]: "a group",
    dict[str, list[float]]: "a group",
    Any: "true, false, text or a number",
}

# the class of a mechanism or of an optimizer defines its settings, so the schema does not list them
FREE_GROUPS = ("model.connection", "model.attention", "optimizer.settings")


@dataclass(frozen=True)
class Key:
    """A leaf of the schema. metadata: the arguments of `depthlm.fields.key`."""

    name: str
    type: Any
    metadata: Mapping[str, Any]

    @property
    def optional(self) -> bool:
        """Whether null is allowed."""
        return types.NoneType in typing.get_args(self.type)

    @property
    def plain_type(self) -> Any:
        """The type without null."""
        inner = [member for member in typing.get_args(self.type) if member is not types.NoneType]
        return inner[0] if self.optional and inner else self.type

    @property
    def choices(self) -> list[str]:
        """The allowed values as a user writes them; empty if there is no list of them."""
        return [str(value).lower() if isinstance(value, bool) else value for value in self.metadata["choices"]]

    @property
    def validated_type(self) -> Any:
        """The type and its bounds, as pydantic validates them."""
        limits = self.metadata
        allowed: Any = self.plain_type
        if limits["choices"] and allowed == list[str]:
            some = list[Literal[limits["choices"]]]  # type: ignore[valid-type, name-defined]
            allowed = Annotated[some, BeforeValidator(_list), Field(min_length=1)]
        elif limits["choices"]:
            allowed = Literal[limits["choices"]]
        elif limits["count"]:
            allowed = Annotated[int, BeforeValidator(parse_count)]
        elif typing.get_origin(allowed) is list:
            allowed = Annotated[allowed, BeforeValidator(_list)]
        elif allowed is float:
            allowed = Annotated[float, Field(allow_inf_nan=False)]
        bounded = Annotated[allowed, Field(ge=limits["minimum"], gt=limits["above"], le=limits["maximum"])]
        return Optional[bounded] if self.optional else bounded

    @property
    def wanted(self) -> str:
        """The allowed values, in words."""
        limits = self.metadata
        if limits["choices"]:
            words = "a list of one or more of " if self.plain_type == list[str] else "one of "
            return words + ", ".join(self.choices)
        words = "a whole number such as 2000000, 300M or 10B" if limits["count"] else WORDS[self.plain_type]
        for name, text in (("minimum", "at least"), ("above", "above"), ("maximum", "at most")):
            if limits[name] is not None:
                words += f", {text} {limits[name]}"
        return words + (", or null" if self.optional else "")


@functools.cache
def keys(schema: type = Config) -> dict[str, Key]:
    """Return every key of a schema by its dotted name."""
    return {key.name: key for key in _walk(schema, "", {})}


def validate(schema: type, values: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the values with their types, and the names of those that their keys do not allow.

    values: by dotted name, without unknown names. If any is not allowed, no value is returned.
    """
    try:
        return _adapter(schema).validate_python(dict(values)), set()
    except ValidationError as error:
        return {}, {str(mistake["loc"][0]) for mistake in error.errors(include_url=False, include_context=False)}


def on_resume(name: str) -> OnResume:
    """Return whether a run may resume with another value of a key or group (see `depthlm.fields.key`)."""
    return "free" if name.split(".")[0].split("/")[0] == "hydra" else _declared(name, "on_resume", "fixed")


def in_protocol(name: str) -> bool:
    """Return whether runs that are compared must share the value of a key or group."""
    return on_resume(name) == "fixed" and _declared(name, "protocol", True)


@functools.cache
def _declared(name: str, attribute: str, default: Any) -> Any:
    """Return an attribute of a key; of a group, such as tracker, if its keys share it; or of a name inside a group."""
    if name in keys():
        return keys()[name].metadata[attribute]
    values = {key.metadata[attribute] for other, key in keys().items() if other.startswith(f"{name}.")}
    parent = name.rpartition(".")[0]
    return values.pop() if len(values) == 1 else _declared(parent, attribute, default) if parent else default


def plain(value: Any) -> Any:
    """Return a value of a composed configuration without OmegaConf's containers."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def leaves(raw: DictConfig) -> list[str]:
    """Return the dotted name of every value in a composed configuration."""
    nested = OmegaConf.to_container(raw, resolve=False)
    assert isinstance(nested, dict)
    return list(flatten(nested))


def flatten(settings: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted name; lists and empty groups are values."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _walk(schema: type, prefix: str, inherited: Mapping[str, Any]) -> Iterator[Key]:
    hints = typing.get_type_hints(schema)
    for entry in dataclasses.fields(schema):
        metadata = {**entry.metadata, **inherited}
        if dataclasses.is_dataclass(hints[entry.name]):
            yield from _walk(hints[entry.name], f"{prefix}{entry.name}.", metadata)
        else:
            yield Key(prefix + entry.name, hints[entry.name], metadata)


@functools.cache
def _adapter(schema: type) -> TypeAdapter[dict[str, Any]]:
    fields = {name: key.validated_type for name, key in keys(schema).items()}
    return TypeAdapter(TypedDict("Values", fields, total=False))  # type: ignore[operator]


def _list(value: Any) -> Any:
    """Split the text of a command's argument, `a,b` or `[a,b]`."""
    if not isinstance(value, str):
        return value
    inside = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    return [part.strip() for part in inside.split(",") if part.strip()]
