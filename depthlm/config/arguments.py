"""Parse the `key=value` arguments of a command into a dataclass whose fields are declared with `key`."""

import dataclasses
import types
from collections.abc import Sequence
from typing import Any, TypeVar, get_args, get_origin

from depthlm.config.schema.keys import Key, walk
from depthlm.config.validate.checks import fits
from depthlm.config.validate.errors import listed, nearest
from depthlm.counts import parse_count
from depthlm.errors import UserError

Arguments = TypeVar("Arguments")


def read_arguments(schema: type[Arguments], given: Sequence[str], prefix: str = "") -> Arguments:
    """Return the arguments of a command as an instance of `schema`.

    Text is taken literally, a list is separated by commas with or without brackets, and null is None.

    prefix: prefix of the keys on the command line, for error messages.

    Raises UserError with all mistakes at once: arguments that are not key=value, unknown keys, missing keys, and values
    that a field does not allow.
    """
    known, errors, values = {key.name: key for key in walk(schema, "")}, [], {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            errors.append(f"{prefix}{text}: not key=value")
        elif name not in known:
            errors.append(f"{prefix}{text}: no such key; allowed: {listed(known)}{nearest(name, known)}")
        else:
            read = _read(known[name], value)
            if read is _WRONG:
                close = nearest(value, known[name].metadata["choices"])
                errors.append(f"{prefix}{text}: must be {known[name].wanted}{close}")
            values[name] = read
    errors += [
        f"{key.name}=...: is missing: {key.metadata['doc']}" for key in _required(schema) if key.name not in values
    ]
    if errors:
        raise UserError(
            "\n".join([f"{len(errors)} mistake{'s' if len(errors) > 1 else ''}:", *(f"  - {e}" for e in errors)])
        )
    return schema(**values)


def described(schema: type) -> str:
    """Return one line per key, with its documentation and default, for --help."""
    required = {key.name for key in _required(schema)}
    defaults = {field.name: field.default for field in dataclasses.fields(schema)}
    lines = []
    for key in walk(schema, ""):
        default = "" if key.name in required or defaults[key.name] is None else f" (default {defaults[key.name]})"
        lines.append(f"  {key.name + '=':18} {key.metadata['doc']}{default}")
    return "\n".join(lines)


_WRONG: Any = object()


def _required(schema: type) -> list[Key]:
    fields = {field.name: field for field in dataclasses.fields(schema)}
    missing = dataclasses.MISSING
    return [
        key
        for key in walk(schema, "")
        if fields[key.name].default is missing and fields[key.name].default_factory is missing
    ]


def _read(key: Key, text: str) -> Any:
    if text == "null":
        return None if key.optional else _WRONG
    plain = next((member for member in get_args(key.type) if member is not types.NoneType), key.type)
    plain = key.type if get_origin(key.type) is list else plain
    try:
        if get_origin(plain) is list:
            (element_type,) = get_args(plain)
            inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
            return [element_type(part.strip()) for part in inside.split(",") if part.strip()]
        if plain is bool:
            value: Any = {"true": True, "false": False}[text]
        else:
            value = parse_count(text) if key.metadata["count"] else plain(text)
    except (ValueError, KeyError, OverflowError):
        return _WRONG
    return value if fits(key, value) else _WRONG
