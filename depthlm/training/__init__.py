"""Training: the loop and what it stands on. It knows no particular mechanism."""

from depthlm.training.run import COMPLETE, FAILED, STOPPED, train

__all__ = ["COMPLETE", "FAILED", "STOPPED", "train"]
