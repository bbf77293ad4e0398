"""Validation during training: losses, the mechanism's diagnostics, and a sample of text."""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from depthlm.config import Config
from depthlm.data import Corpus, DocumentRows, TokenFiles, validation_batches
from depthlm.distributed.process_group import on_any_rank
from depthlm.distributed.signals import StopRequest
from depthlm.distributed.watchdog import Activity
from depthlm.errors import DataError
from depthlm.losses import document_rows, total_loss
from depthlm.model import Connection, Decoder, Observer
from depthlm.model.connection import State
from depthlm.model.generation import generate
from depthlm.runs.records import ValidationLosses, finite
from depthlm.training.engine import Engine, autocast
from depthlm.training.plan import Plan

log = logging.getLogger("depthlm")

# validation batches between two checks of whether any rank has received a signal
STOP_CHECK_EVERY = 8


class ValidationStopped(Exception):
    """Raised when a rank has received a signal; the validation is repeated when the run is resumed."""


def validate(
    config: Config, plan: Plan, corpus: Corpus, engine: Engine, activity: Activity, request: StopRequest
) -> ValidationLosses:
    """Measure the loss of each validation set; collective. Raises ValidationStopped once any rank holds a signal."""
    losses = {}
    with engine.evaluation_mode(), autocast(config, engine.device):
        for name, tokens in corpus.validation.items():
            rows = batches(config, plan, tokens, document_rows(config, corpus.tokenizer))
            marked = mark_each(rows, activity, request, engine.device)
            losses[name] = finite(total_loss(engine.model, marked, engine.device).mean)
    return ValidationLosses(losses)


def mechanism_diagnostics(config: Config, plan: Plan, corpus: Corpus, engine: Engine) -> dict[str, float | None]:
    """Measure the mechanism's diagnostics on the first validation batch; collective.

    Returns the maximum over all ranks by its name in metrics.jsonl, None for non-finite values. Those of a pipeline are
    not measured, since no rank has all layers.
    """
    if plan.stages > 1:
        return {}
    inputs, _ = next(batches(config, plan, next(iter(corpus.validation.values()))))
    with engine.evaluation_mode(), autocast(config, engine.device):
        local = diagnose(engine.model, inputs.to(engine.device))
    largest = torch.tensor(list(local.values()), device=engine.device)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return {f"mechanism/{name}": finite(value) for name, value in zip(local, largest.tolist(), strict=True)}


def log_sample(config: Config, engine: Engine, corpus: Corpus) -> None:
    """Log the model's continuation of training.sample, but not in a pipeline, or if the tokenizer cannot encode it.

    Collective, since at ZeRO 3 no rank can compute alone.
    """
    prompt = config.training.sample
    if prompt is None:
        return
    if config.training.pipeline.stages > 1:
        log.info("training.sample: no sample in a pipeline, whose ranks have parts of the model")
        return
    try:
        (prompt_ids,) = corpus.tokenizer.encode_batch([prompt])
    except DataError as error:
        log.warning("training.sample=%s: no sample: %s", prompt, error)
        return
    tokens = torch.tensor([[corpus.tokenizer.end_of_text, *prompt_ids]])
    generator = torch.Generator(engine.device).manual_seed(config.seed)
    settings = {"temperature": 0.7, "top_k": 50, "generator": generator, "vocab_size": corpus.tokenizer.vocab_size}
    # compiling for every length of a sample would take longer than the sample
    with engine.evaluation_mode(), autocast(config, engine.device), torch.compiler.set_stance("force_eager"):
        sampled = generate(engine.model, tokens.to(engine.device), 64, **settings)
    text = corpus.tokenizer.decode(sampled[0, 1:].tolist())
    # a sample may contain what looks like a log line
    log.info("a sample:\n%s", text, extra={"highlighter": None})


@torch.no_grad()
def diagnose(model: Decoder, tokens_bt: Tensor) -> dict[str, float]:
    """Return the maximum over tokens and sublayers of each value of `Connection.diagnostics`."""
    if all(type(connection).diagnostics is Connection.diagnostics for connection in model.connections):
        return {}
    largest: dict[str, Tensor] = {}
    memory: dict[str, Any] = {}

    class Diagnoses(Observer):
        def read(self, connection: Connection, state: State) -> None:
            for name, value in connection.diagnostics(state, memory).items():
                largest[name] = torch.maximum(largest[name], value.max()) if name in largest else value.max()

    model(tokens_bt, observer=Diagnoses())
    return {name: float(value) for name, value in largest.items()}


def mark_each(
    batches: Iterator[tuple[Tensor, Tensor]], activity: Activity, request: StopRequest, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same batches and mark progress at each. Raises ValidationStopped if a rank has a signal; collective."""
    check_every = 1 if torch.distributed.get_world_size() == 1 else STOP_CHECK_EVERY
    for number, batch in enumerate(batches):
        activity.mark_progress()
        if number % check_every == 0 and on_any_rank((request.name is not None,), device)[0]:
            raise ValidationStopped
        yield batch


def batches(
    config: Config, plan: Plan, tokens: TokenFiles, documents: DocumentRows | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return this rank's batches of a validation set. documents: with one of them in each row."""
    return validation_batches(
        tokens,
        plan.sequence_length,
        plan.micro_batch_size,
        config.training.validation_tokens,
        documents=documents,
        rank=torch.distributed.get_rank() // plan.stages,
        ranks=plan.replicas,
    )
