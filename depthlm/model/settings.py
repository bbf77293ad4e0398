"""Checks of a mechanism's settings. Each gives its problems as lines that start with the setting and what was given."""

from collections.abc import Iterable


def check(*problems: list[str]) -> None:
    """Raises ValueError with a line for every problem, where there is one."""
    lines = [line for found in problems for line in found]
    if lines:
        raise ValueError("\n".join(lines))


def at_least(bound: int, *, optional: bool = False, **settings: object) -> list[str]:
    """The settings that are no whole number of at least `bound`; None is one of them unless optional."""
    return [
        f"{name}={shown(value)}: must be a whole number of at least {bound}{', or null' if optional else ''}"
        for name, value in settings.items()
        if not (optional and value is None) and (type(value) is not int or value < bound)
    ]


def one_of(choices: Iterable[str | int], **settings: object) -> list[str]:
    """The settings that are none of the choices; true is not 1, and "1" neither."""
    allowed = list(choices)
    return [
        f"{name}={shown(value)}: must be one of {', '.join(map(str, allowed))}"
        for name, value in settings.items()
        if not any(value == choice and type(value) is type(choice) for choice in allowed)
    ]


def boolean(**settings: object) -> list[str]:
    """The settings that are neither true nor false."""
    return [
        f"{name}={shown(value)}: must be true or false"
        for name, value in settings.items()
        if not isinstance(value, bool)
    ]


def shown(value: object) -> str:
    """A value as YAML has it; text that reads as something else in quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, str) and not value.isidentifier() else str(value)
