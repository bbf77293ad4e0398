"""Parse the `key=value` arguments of a command into a dataclass whose fields are declared with `key`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from depthlm.config.keys import keys, override_text, split_list, validate
from depthlm.counts import format_count
from depthlm.errors import UserError, join_names, nearest

Arguments = TypeVar("Arguments")


def read_arguments(schema: type[Arguments], given: Sequence[str], prefix: str = "") -> Arguments:
    """Return the arguments of a command as an instance of `schema`.

    Text is taken literally, a list is separated by commas with or without brackets, and null is None.

    prefix: prefix of the keys on the command line, for error messages.

    Raises UserError with all mistakes at once: arguments that are not key=value, unknown keys, missing keys, and values
    that a field does not allow.
    """
    known, errors = keys(schema), []  # type: ignore[arg-type]
    values: dict[str, str | list[str] | None] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            hint = nearest(text.lstrip("-"), known)
            if "run" in known and Path(text).is_dir():
                hint = f"; did you mean `run={text}`?"
            errors.append(f"{prefix}{text}: not key=value{hint}")
        elif name not in known:
            errors.append(f"{prefix}{text}: no such key; allowed: {join_names(known)}{nearest(name, known)}")
        else:
            values[name] = None if value == "null" else split_list(value) if known[name].is_list else value
    read, places = validate(schema, values)
    for name in dict.fromkeys(place[0] for place in places):
        if name in values:
            close = nearest(str(values[name]), known[name].choices)
            errors.append(f"{prefix}{name}={override_text(values[name])}: must be {known[name].wanted}{close}")
        else:
            errors.append(f"{prefix}{name}=...: is missing: {known[name].doc}")
    if errors or read is None:
        raise UserError("\n".join([f"{format_count(len(errors), 'mistake')}:", *(f"  - {e}" for e in errors)]))
    return read


def describe_keys(schema: type) -> str:
    """Return one line per key, with its documentation and default, for --help."""
    lines = []
    for field in dataclasses.fields(schema):
        # an empty list or text is no setting, and neither is the factory of a list
        default = "" if field.default in (None, "", dataclasses.MISSING) else f" (default {field.default})"
        lines.append(f"  {field.name + '=':18} {field.metadata['description']}{default}")
    return "\n".join(lines)
