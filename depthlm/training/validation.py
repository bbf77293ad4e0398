"""Validation during training: losses, and what the mechanism tells of its work."""

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
from depthlm.training.engine.deepspeed import autocast
from depthlm.training.plan import Plan

# batches between two times that several ranks ask each other whether to stop
ASK_EVERY = 8


class ValidationStopped(Exception):
    """A signal came to a rank; the next start of the run repeats the validation."""


def validator(
    config: Config,
    plan: Plan,
    corpus: Corpus,
    model: Decoder,
    device: torch.device,
    watch: Activity,
    request: StopRequest,
) -> Callable[[], dict[str, float | None]]:
    """A function that measures the mean loss (nats per token) and perplexity on each validation set; collective.

    By their names in metrics.jsonl; what is not finite is None. It raises ValidationStopped once `request` holds a
    signal on any rank.
    """

    def losses() -> dict[str, float | None]:
        measured: dict[str, float | None] = {}
        for name, tokens in corpus.validation.items():
            with autocast(config, device):
                loss = total_loss(model, marked(batches(config, plan, tokens), watch, request, device), device).mean
            finite = loss if math.isfinite(loss) else None
            measured |= {f"validation/{name}/loss": finite, f"validation/{name}/perplexity": perplexity(finite)}
        return measured

    return losses


def diagnoser(
    config: Config, plan: Plan, corpus: Corpus, model: Decoder, device: torch.device
) -> Callable[[], dict[str, float | None]]:
    """A function that gives what the mechanism tells of the first validation batch, the largest of all ranks;
    collective.

    By the names in metrics.jsonl; what is not finite is None.
    """

    def diagnostics() -> dict[str, float | None]:
        inputs, _ = next(batches(config, plan, next(iter(corpus.validation.values()))))
        with autocast(config, device):
            told = diagnose(model, inputs.to(device))
        largest = torch.tensor(list(told.values()), device=device)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        pairs = zip(told, largest.tolist(), strict=True)
        return {f"mechanism/{name}": value if math.isfinite(value) else None for name, value in pairs}

    return diagnostics


def marked(
    batches: Iterator[tuple[Tensor, Tensor]], watch: Activity, request: StopRequest, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batches; each is progress. Raises ValidationStopped where a rank is to stop; collective."""
    ask_every = 1 if torch.distributed.get_world_size() == 1 else ASK_EVERY
    for number, batch in enumerate(batches):
        watch.go_on()
        if number % ask_every == 0 and on_any_rank((request.name is not None,), device)[0]:
            raise ValidationStopped
        yield batch


def batches(config: Config, plan: Plan, tokens: TokenFiles) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of a validation set."""
    return validation_batches(
        tokens,
        plan.sequence_length,
        plan.micro_batch_size,
        config.training.validation_tokens,
        rank=torch.distributed.get_rank(),
        ranks=plan.world_size,
    )
