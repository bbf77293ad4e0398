"""Checks of a mechanism's settings. Each returns one line per problem, which starts with the setting and its value."""

import math
from collections.abc import Iterable, Sequence


def check(*problems: list[str]) -> None:
    """Raise ValueError with one line per problem, if there is any."""
    lines = [line for group in problems for line in group]
    if lines:
        raise ValueError("\n".join(lines))


def at_least(bound: int, *, optional: bool = False, **settings: object) -> list[str]:
    """Report the settings that are not a whole number of at least `bound`. Optional settings may be None."""
    return [
        f"{name}={format_setting(value)}: must be a whole number of at least {bound}{', or null' if optional else ''}"
        for name, value in settings.items()
        if not (optional and value is None) and (type(value) is not int or value < bound)
    ]


def number(bound: float, **settings: object) -> list[str]:
    """Report the settings that are not a finite number of at least `bound`."""
    return [
        f"{name}={format_setting(value)}: must be a number of at least {bound:g}"
        for name, value in settings.items()
        if not isinstance(value, int | float) or isinstance(value, bool) or not bound <= value < math.inf
    ]


def one_of(choices: Iterable[str | int], **settings: object) -> list[str]:
    """Report the settings that are none of the choices. Types must match: neither true nor "1" equals 1."""
    allowed = list(choices)
    return [
        f"{name}={format_setting(value)}: must be one of {', '.join(map(str, allowed))}"
        for name, value in settings.items()
        if not any(value == choice and type(value) is type(choice) for choice in allowed)
    ]


def layers_problems(num_layers: int, **settings: object) -> list[str]:
    """Report the settings that are neither None, nor a period, nor a list of layers (see `includes`)."""
    problems = []
    for name, value in settings.items():
        if not isinstance(value, Sequence) or isinstance(value, str):
            problems += [f"{each}, or a list of layers" for each in at_least(1, **{name: value}, optional=True)]
        elif not all(type(layer) is int and 0 <= layer < num_layers for layer in value):
            problems.append(f"{name}={format_setting(list(value))}: the layers must be from 0 to {num_layers - 1}")
    return problems


def includes(layer: int, layers: int | Sequence[int] | None) -> bool:
    """Return whether a layer is one of every k-th, for a period k, or of a list of layers. None: no layer."""
    if layers is None:
        return False
    return (layer + 1) % layers == 0 if isinstance(layers, int) else layer in layers


def boolean(**settings: object) -> list[str]:
    """Report the settings that are neither true nor false."""
    return [
        f"{name}={format_setting(value)}: must be true or false"
        for name, value in settings.items()
        if not isinstance(value, bool)
    ]


def format_setting(value: object) -> str:
    """Return a value as YAML writes it. Text is quoted unless it is an identifier."""
    if isinstance(value, list):
        return f"[{','.join(map(format_setting, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, str) and not value.isidentifier() else str(value)
