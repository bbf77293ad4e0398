"""The options of conf/, and configurations of them that Hydra has not composed."""

import ast
from dataclasses import replace
from functools import cache
from typing import Any

import yaml

from depthlm.config import Config, compose
from depthlm.locations import CONF

PARTS = ("connection", "attention")


@cache
def _read(group: str, name: str) -> str:
    return (CONF / group / f"{name}.yaml").read_text()


def option(group: str, name: str) -> dict[str, Any]:
    """Return the settings of an option."""
    return yaml.safe_load(_read(group, name))


def parts_of(preset: str) -> dict[str, str]:
    """Return the names of the connection and the attention of a preset."""
    defaults = (default for default in option("model", preset)["defaults"] if isinstance(default, dict))
    return {part: name for default in defaults for part, name in default.items()}


def mechanism(preset: str) -> dict[str, dict[str, Any]]:
    """Return the settings of the connection and the attention of a preset."""
    own = option("model", preset)
    return {part: option(f"model/{part}", name) | own.get(part, {}) for part, name in parts_of(preset).items()}


@cache
def composed(*overrides: str) -> Config:
    """Return a composed configuration, which no test changes."""
    return compose([*overrides], here=False)


@cache
def configuration(*overrides: str) -> Config:
    """Return the configuration of overrides with the keys and options of model, size and backbone put in directly.

    Hydra takes a fifth of a second for each new choice of options. Only the length of the sequences and the learning
    rate follow from the size.
    """
    given = dict(override.split("=", 1) for override in overrides)
    rest = {
        key: given.pop(key) for key in [*given] if key.split(".")[0].split("/")[0] not in ("model", "size", "backbone")
    }
    config = composed(*(f"{key}={value}" for key, value in rest.items()))
    preset = given.pop("model", "vanilla")
    model: dict[str, Any] = {"name": preset, **mechanism(preset)}
    size, backbone = option("size", given.pop("size", "micro")), option("backbone", given.pop("backbone", "qwen3"))
    for part in PARTS:
        if f"model/{part}" in given:
            model[part] = option(f"model/{part}", given.pop(f"model/{part}"))
    for key, text in given.items():
        group, _, name = key.partition(".")
        part, _, setting = name.partition(".")
        settings = {"size": size, "backbone": backbone, "model": model[part] if setting else model}[group]
        settings[setting or name] = _value(text)
    length, lr = rest.get("training.sequence_length", size["sequence_length"]), rest.get("optimizer.lr", size["lr"])
    return replace(
        config,
        model=replace(config.model, **model),
        size=replace(config.size, **size),
        backbone=replace(config.backbone, **backbone),
        training=replace(config.training, sequence_length=int(length)),
        optimizer=replace(config.optimizer, lr=float(lr)),
    )


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return yaml.safe_load(text)
