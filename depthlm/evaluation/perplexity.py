"""Loss on a whole validation set."""

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
