"""Training: the loop and what it stands on. It knows no particular mechanism."""

from depthlm.distributed.signals import STOPPED, hand_back
from depthlm.training.run import COMPLETE, FAILED, train

__all__ = ["COMPLETE", "FAILED", "STOPPED", "hand_back", "train"]
