"""depthlm: pretrain language models whose layers reach across depth."""

from depthlm.build import build_model
from depthlm.config import compose
from depthlm.loading import load

__all__ = ["build_model", "compose", "load"]
