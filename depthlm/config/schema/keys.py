"""The flat list of the schema's keys, each with its type and documentation."""

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from depthlm.config.schema import Config
from depthlm.config.schema.experiment import Column

# the class of a mechanism or of an optimizer defines its settings, so the schema does not list them
FREE_GROUPS = ("model.connection", "model.attention", "optimizer.settings")


@dataclass(frozen=True)
class Key:
    """A leaf of the schema."""

    name: str
    type: Any
    metadata: typing.Mapping[str, Any]

    @property
    def optional(self) -> bool:
        """Whether null is allowed."""
        return types.NoneType in typing.get_args(self.type)

    @property
    def wanted(self) -> str:
        """The allowed values, in words."""
        m = self.metadata
        if m["choices"]:
            return "one of " + ", ".join(m["choices"])
        kinds = {
            int: "an integer", float: "a number", bool: "true or false", str: "text", list[int]: "a list of integers",
            list[float]: "a list of numbers", list[str]: "a list of texts", dict[str, Any]: "a group",
            list[Any]: "a list", dict[str, Column]: "a group", dict[str, list[float]]: "a group",
        }  # fmt: skip
        inner = [t for t in typing.get_args(self.type) if t is not types.NoneType]
        plain = inner[0] if self.optional and inner else self.type
        words = "a whole number such as 2000000, 300M or 10B" if m["count"] else kinds[plain]
        bounds = [
            text
            for text in (
                f"at least {m['minimum']}" if m["minimum"] is not None else "",
                f"above {m['above']}" if m["above"] is not None else "",
                f"at most {m['maximum']}" if m["maximum"] is not None else "",
            )
            if text
        ]
        return ", ".join([words, *bounds]) + (", or null" if self.optional else "")


def keys() -> dict[str, Key]:
    """Return every key of the schema by its dotted name."""
    return {key.name: key for key in walk(Config, "")}


def leaves(raw: DictConfig) -> list[str]:
    """Return the dotted name of every value in a composed configuration."""

    def walk(node: dict[Any, Any], prefix: str) -> Iterator[str]:
        for name, value in node.items():
            if isinstance(value, dict) and value:
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    plain = OmegaConf.to_container(raw, resolve=False)
    assert isinstance(plain, dict)
    return list(walk(plain, ""))


def walk(schema: type, prefix: str) -> Iterator[Key]:
    """Yield every key of a dataclass of the schema, with its name after `prefix`."""
    hints = typing.get_type_hints(schema)
    for entry in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[entry.name]):
            yield from walk(hints[entry.name], f"{prefix}{entry.name}.")
        else:
            yield Key(prefix + entry.name, hints[entry.name], entry.metadata)
