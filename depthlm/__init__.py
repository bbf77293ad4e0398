"""depthlm: pretrain language models whose layers reach across depth."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from depthlm.build import build_model
    from depthlm.config.compose import compose
    from depthlm.loading import load

__all__ = ["build_model", "compose", "load"]

MODULES = {"build_model": "depthlm.build", "compose": "depthlm.config", "load": "depthlm.loading"}


def __getattr__(name: str) -> object:
    # imported at first use, since torch takes seconds and a command answers --help and Ctrl-C without it
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(MODULES[name]), name)
