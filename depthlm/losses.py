"""The loss of a decoder on batches of a validation set."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from depthlm.config import Config
from depthlm.data import DocumentRows, Tokenizer
from depthlm.model import Decoder


class TotalLoss(NamedTuple):
    """Sums over a validation set. nats: negative log-likelihood. tokens: number of targets."""

    nats: float
    tokens: int

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens


def total_loss(model: Decoder, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> TotalLoss:
    """Return the negative log-likelihood of batches (inputs [b, T], targets [b, T]), summed over ranks in float64."""
    total = local_loss(model, batches, device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
    return TotalLoss(float(total[0]), int(total[1]))


@torch.no_grad()
def local_loss(model: Decoder, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """Return the negative log-likelihood of this rank's batches in nats, and the number of their targets, as [2]."""
    training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for inputs, targets in batches:
        loss = model(inputs.to(device), targets.to(device))
        total += torch.stack([loss.nll.double(), loss.tokens.double()])
    model.train(training)
    return total


def document_rows(config: Config, tokenizer: Tokenizer) -> DocumentRows | None:
    """Return how a run's validation sets are divided into documents; None: they are not."""
    longest = config.training.validation_document_tokens
    return None if longest is None else DocumentRows(tokenizer.end_of_text, longest)
