"""Package attributes that are imported at first use: torch takes seconds to import, and `--help` does not need it."""

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` (PEP 562) of a package.

    modules: the module that defines each name, relative to the package. No name may equal that of a submodule, because
    importing the submodule would overwrite the attribute.
    """

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get
