"""Evaluation of trained models: losses, tasks and text generation."""

from depthlm.evaluation.generation import generate, stream
from depthlm.evaluation.losses import TotalLoss, total_loss

__all__ = ["TotalLoss", "generate", "stream", "total_loss"]
