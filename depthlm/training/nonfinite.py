"""Bad batches (a non-finite loss or gradient, or a loss spike): the limit of a spike, and descriptions for the log."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import torch

from depthlm.config.schema import Training

MAX_WINDOWS_LOGGED = 8


class DivergedError(RuntimeError):
    """Raised when a non-finite loss or gradient, or too many bad batches in a row, end the run."""


def spike_limit(training: Training, recent_losses: Sequence[float], tokens: int) -> float:
    """Return the summed loss (nats) above which a batch of `tokens` tokens is a spike; infinity if it cannot be one.

    recent_losses: the losses of the newest updates, in nats per token.
    """
    if training.spike_deviations is None or len(recent_losses) < max(2, training.spike_window / 2):
        return math.inf
    limit = (fmean(recent_losses) + training.spike_deviations * stdev(recent_losses)) * tokens
    # rounded to fp32, in which the device compares: it must skip exactly the batches that are logged as spikes
    return torch.tensor(limit, dtype=torch.float32).item()


def spike_text(loss: float, recent_losses: Sequence[float]) -> str:
    """Describe how far a loss is above the recent ones; all in nats per token."""
    mean, deviation = fmean(recent_losses), stdev(recent_losses)
    deviations = (loss - mean) / deviation if deviation else math.inf
    return f"its loss {loss:.2f} is a spike: {deviations:.1f} standard deviations above the mean {mean:.2f}"


def windows_text(windows: dict[str, list[int]]) -> str:
    """Describe the windows of a batch by source; only the first few are listed."""
    parts = []
    for name, numbers in windows.items():
        rest = f" and {len(numbers) - MAX_WINDOWS_LOGGED} more" if len(numbers) > MAX_WINDOWS_LOGGED else ""
        parts.append(f"windows {', '.join(map(str, numbers[:MAX_WINDOWS_LOGGED]))}{rest} of {name}")
    return ", ".join(parts)
