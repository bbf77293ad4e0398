"""The classes of all mechanisms, by the names of their modules."""

import importlib
import pkgutil
from collections.abc import Iterator

import depthlm.mechanisms
from depthlm.model import Connection
from depthlm.model.attention.self_attention import SelfAttention


def mechanisms() -> Iterator[type]:
    for module in pkgutil.iter_modules(depthlm.mechanisms.__path__, "depthlm.mechanisms."):
        for member in vars(importlib.import_module(module.name)).values():
            is_own = isinstance(member, type) and member.__module__ == module.name
            if is_own and issubclass(member, Connection | SelfAttention):
                yield member


CLASSES = {"self_attention": SelfAttention} | {kind.__module__.rpartition(".")[2]: kind for kind in mechanisms()}
