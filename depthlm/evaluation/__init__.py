"""What one does with a trained model: measure it, and let it write."""

from depthlm.evaluation.generation import generate
from depthlm.evaluation.perplexity import mean_loss

__all__ = ["generate", "mean_loss"]
