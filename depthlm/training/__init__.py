"""Training: the loop and what it stands on. It knows no particular mechanism."""

from depthlm.training.run import COMPLETE, FAILED, STOPPED, train
from depthlm.training.signals import hand_back

__all__ = ["COMPLETE", "FAILED", "STOPPED", "hand_back", "train"]
