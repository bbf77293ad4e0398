"""Validation during training."""

import math
from collections.abc import Callable

import torch

from depthlm.config import Config
from depthlm.data import Corpus, validation_batches
from depthlm.evaluation import mean_loss
from depthlm.model import Decoder
from depthlm.training.engine import autocast
from depthlm.training.plan import Plan


def validator(
    config: Config, plan: Plan, corpus: Corpus, model: Decoder, device: torch.device
) -> Callable[[], dict[str, float | None]]:
    """A function that measures the mean loss (nats per token) on each validation set; collective.

    By their names in metrics.jsonl; what is not finite is None.
    """

    def losses() -> dict[str, float | None]:
        measured = {}
        for name, tokens in corpus.validation.items():
            batches = validation_batches(
                tokens,
                plan.sequence_length,
                plan.micro_batch_size,
                config.training.validation_tokens,
                rank=torch.distributed.get_rank(),
                ranks=plan.world_size,
            )
            with autocast(config, device):
                loss = mean_loss(model, batches, device)
            measured[f"validation/{name}/loss"] = loss if math.isfinite(loss) else None
        return measured

    return losses
