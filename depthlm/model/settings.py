"""Checks of a mechanism's settings. Each returns one line per problem, which starts with the setting and its value."""

import math
from collections.abc import Iterable


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
