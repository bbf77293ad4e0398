"""Other attributes of an object for a while, such as methods of DeepSpeed's objects."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replace_attributes(target: Any, **attributes: Any) -> Iterator[None]:
    """Give an object or a module other attributes while the block runs."""
    before = {name: vars(target)[name] for name in attributes if name in vars(target)}
    try:
        for name, value in attributes.items():
            setattr(target, name, value)
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(target, name, before[name])
            else:
                vars(target).pop(name, None)
