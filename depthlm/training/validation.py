"""Validation during training: losses, and the mechanism's diagnostics."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from depthlm.config import Config
from depthlm.data import Corpus, TokenFiles, validation_batches
from depthlm.distributed.collectives import on_any_rank
from depthlm.distributed.signals import StopRequest
from depthlm.distributed.watchdog import Activity
from depthlm.evaluation import diagnose, perplexity, total_loss
from depthlm.model import Decoder
from depthlm.training.engine import autocast
from depthlm.training.plan import Plan

# validation batches between two checks of whether any rank has received a signal
STOP_CHECK_EVERY = 8


class ValidationStopped(Exception):
    """Raised when a rank has received a signal; the validation is repeated when the run is resumed."""


def validator(
    config: Config,
    plan: Plan,
    corpus: Corpus,
    model: Decoder,
    device: torch.device,
    activity: Activity,
    request: StopRequest,
) -> Callable[[], dict[str, float | None]]:
    """Return a function that measures the mean loss (nats per token) and perplexity of each validation set; collective.

    The function returns values by their names in metrics.jsonl, None for non-finite ones. It raises ValidationStopped
    once `request` holds a signal on any rank.
    """

    def losses() -> dict[str, float | None]:
        measured: dict[str, float | None] = {}
        for name, tokens in corpus.validation.items():
            with autocast(config, device):
                loss = total_loss(model, marked(batches(config, plan, tokens), activity, request, device), device).mean
            finite = loss if math.isfinite(loss) else None
            measured |= {f"validation/{name}/loss": finite, f"validation/{name}/perplexity": perplexity(finite)}
        return measured

    return losses


def diagnoser(
    config: Config, plan: Plan, corpus: Corpus, model: Decoder, device: torch.device
) -> Callable[[], dict[str, float | None]]:
    """Return a function that measures the mechanism's diagnostics on the first validation batch; collective.

    The function returns the maximum over all ranks by its name in metrics.jsonl, None for non-finite values.
    """

    def diagnostics() -> dict[str, float | None]:
        inputs, _ = next(batches(config, plan, next(iter(corpus.validation.values()))))
        with autocast(config, device):
            local = diagnose(model, inputs.to(device))
        largest = torch.tensor(list(local.values()), device=device)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        pairs = zip(local, largest.tolist(), strict=True)
        return {f"mechanism/{name}": value if math.isfinite(value) else None for name, value in pairs}

    return diagnostics


def marked(
    batches: Iterator[tuple[Tensor, Tensor]], activity: Activity, request: StopRequest, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same batches and mark progress at each. Raises ValidationStopped if a rank has a signal; collective."""
    check_every = 1 if torch.distributed.get_world_size() == 1 else STOP_CHECK_EVERY
    for number, batch in enumerate(batches):
        activity.go_on()
        if number % check_every == 0 and on_any_rank((request.name is not None,), device)[0]:
            raise ValidationStopped
        yield batch


def batches(config: Config, plan: Plan, tokens: TokenFiles) -> Iterator[tuple[Tensor, Tensor]]:
    """Return this rank's batches of a validation set."""
    return validation_batches(
        tokens,
        plan.sequence_length,
        plan.micro_batch_size,
        config.training.validation_tokens,
        rank=torch.distributed.get_rank(),
        ranks=plan.world_size,
    )
