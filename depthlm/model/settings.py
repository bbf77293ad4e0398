"""Checks of a mechanism's settings: a bad value is a ValueError that starts with the setting and what was given."""


def at_least(bound: int, **settings: int | None) -> None:
    """Raises ValueError for a setting that is no whole number of at least `bound`; None passes."""
    for name, value in settings.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < bound):
            raise ValueError(f"{name}={value}: must be a whole number of at least {bound}")


def one_of(choices: tuple[object, ...], **settings: object) -> None:
    """Raises ValueError for a setting that is none of the choices."""
    for name, value in settings.items():
        if value not in choices:
            raise ValueError(f"{name}={value}: must be one of {', '.join(map(str, choices))}")
