"""Loss and perplexity on a whole validation set."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from depthlm.model import Decoder


@torch.no_grad()
def mean_loss(model: Decoder, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> float:
    """Mean negative log-likelihood in nats per target over (inputs [b, T], targets [b, T]), all ranks together."""
    training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for inputs, targets in batches:
        loss = model(inputs.to(device), targets.to(device))
        total += torch.stack([loss.nll.double(), loss.tokens.double()])
    model.train(training)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
    return float(total[0] / total[1])


def perplexity(loss: float | None) -> float | None:
    """exp of a loss in nats per token; None where there is none, or a float cannot hold it."""
    return math.exp(loss) if loss is not None and loss < 700 else None
