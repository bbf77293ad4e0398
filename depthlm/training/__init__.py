"""Training: the loop and its parts, independent of any particular mechanism."""

from depthlm.distributed.signals import STOPPED
from depthlm.training.run import FAILED, train
from depthlm.training.trainer import COMPLETE

__all__ = ["COMPLETE", "FAILED", "STOPPED", "train"]
