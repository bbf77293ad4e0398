"""What one does with a trained model: measure it, and let it write."""

from depthlm.evaluation.diagnostics import diagnose
from depthlm.evaluation.generation import generate
from depthlm.evaluation.perplexity import mean_loss, perplexity

__all__ = ["diagnose", "generate", "mean_loss", "perplexity"]
