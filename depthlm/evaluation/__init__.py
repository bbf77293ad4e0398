"""Evaluation of trained models: losses, tasks and text generation."""

from depthlm.evaluation.diagnostics import diagnose
from depthlm.evaluation.generation import generate, stream
from depthlm.evaluation.perplexity import TotalLoss, total_loss

__all__ = ["TotalLoss", "diagnose", "generate", "stream", "total_loss"]
