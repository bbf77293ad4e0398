"""depthlm: pretrain language models whose layers reach across depth."""

from typing import TYPE_CHECKING

from depthlm.lazy import lazy_attributes

if TYPE_CHECKING:
    from depthlm.build import build_model, load
    from depthlm.config.compose import compose
    from depthlm.training import train

__all__ = ["__version__", "build_model", "compose", "load", "train"]
__version__ = "0.2.0"

__getattr__ = lazy_attributes(
    __name__, {"build_model": "build", "compose": "config", "load": "build", "train": "training"}
)


def __dir__() -> list[str]:
    """List the public names, of which most are imported at first use."""
    return list(__all__)
