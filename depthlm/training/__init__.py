"""Training: the loop and what it stands on. It knows no particular mechanism."""

from depthlm.training.run import COMPLETE, FAILED, train
from depthlm.training.signals import STOPPED, hand_back

__all__ = ["COMPLETE", "FAILED", "STOPPED", "hand_back", "train"]
