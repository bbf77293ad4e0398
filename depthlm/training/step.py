"""One training step: the gradients of a global batch, and the update."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from depthlm.config import Config
from depthlm.data.sampler import Batches, inputs_and_targets
from depthlm.model.layer import UNOBSERVED, Observer
from depthlm.model.parameters import generator_for
from depthlm.training.engine import Engine
from depthlm.training.monitoring.meters import RoutingMeter
from depthlm.training.plan import Plan


class Step(NamedTuple):
    """A step just taken. nll: the summed loss of the global batch (nats). spike_limit: the loss above which it is a
    spike. loss_scale: the scale of the step, which the engine may have changed since."""

    nll: float
    learning_rate: float
    loss_scale: float
    spike_limit: float


def dropout_seeds(config: Config, step: int, batches: Batches) -> torch.Tensor | None:
    """Return a seed of dropout for each sequence of this rank in a step, from 0, as int32 [accumulation, micro_batch].

    A sequence has the same seed on any number of ranks and with any micro-batch. None: the run has no dropout.
    """
    if not config.backbone.dropout:
        return None
    generator = generator_for(config.seed, f"dropout of step {step}")
    seeds = torch.randint(2**31 - 1, (batches.batch_size,), generator=generator, dtype=torch.int32)
    return seeds[batches.positions].view(-1, batches.micro_batch)


def train_step(
    engine: Engine,
    batch: torch.Tensor,
    plan: Plan,
    z_loss: float,
    highest: float = math.inf,
    mark: Callable[[str], None] = lambda phase: None,
    observer: Observer = UNOBSERVED,
    routing: RoutingMeter | None = None,
    seeds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Take one step on batch [accumulation, micro_batch, T + 1]. Returns the token losses summed over all ranks (nats).

    The loss is divided by the number of tokens in the global batch. The engine divides by the accumulation steps and
    averages over the ranks, so the loss is multiplied by both. If the summed loss is not finite, or above `highest`,
    the update is skipped. mark: called with each phase of the step. observer: sees every micro-batch.
    routing: gets the routing of a model with experts. seeds: of dropout, [accumulation, micro_batch].
    """
    if routing is not None:
        routing.begin()
    totals = torch.zeros(2, device=batch.device)
    seeds = None if seeds is None else seeds.to(batch.device)
    scale = plan.accumulation * plan.world_size / plan.tokens_per_step
    for number, tokens in enumerate(batch, 1):
        mark("forward")
        inputs, targets = inputs_and_targets(tokens)
        sums = engine(inputs, targets, observer, None if seeds is None else seeds[number - 1])
        if routing is not None and sums.routing is not None:
            routing.add(sums.routing)
        loss = sums.total(z_loss)
        totals += torch.stack((sums.nll.detach(), loss.detach()))
        if number == len(batch):
            mark("reducing the loss")
            torch.distributed.all_reduce(totals)
            skip = ~torch.isfinite(totals).all() | (totals[0] > highest)
            # every ZeRO stage skips a non-finite gradient: all ranks then agree, and the host need not synchronize here
            loss = loss * torch.where(skip, math.nan, 1.0)
        mark("backward")
        engine.backward(loss * scale)
        engine.step()
    if routing is not None:
        routing.end(engine.step_applied())
    return totals[0]
