"""One training step: the gradients of a global batch, and the update."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from depthlm.config import Config
from depthlm.data.sampler import Batches
from depthlm.model.layer import UNOBSERVED, Observer
from depthlm.model.parameters import generator_for
from depthlm.training.engine import Engine
from depthlm.training.graphs import MicroBatchGraphs, run_forward
from depthlm.training.monitoring.metrics import RoutingMeter
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
    *,
    mark: Callable[[str], None] = lambda phase: None,
    observer: Observer = UNOBSERVED,
    routing: RoutingMeter | None = None,
    seeds: torch.Tensor | None = None,
    graphs: MicroBatchGraphs | None = None,
) -> float:
    """Take one step on batch [accumulation, micro_batch, T + 1]. Returns the token losses summed over all ranks (nats).

    The loss is multiplied by `plan.loss_factor`. If the summed loss is not finite, or above `highest`, the update is
    skipped. mark: called with each phase of the step. observer: sees every micro-batch, which needs `graphs=None`.
    routing: gets the routing of a model with experts. seeds: of dropout, [accumulation, micro_batch].
    graphs: replay the micro-batches; None: no graphs.

    In a pipeline, the engine runs the micro-batches, with the z-loss of its configuration and without an observer,
    routing or graphs.
    """
    replays = graphs is not None and graphs.begin_step()
    if seeds is not None and seeds.device != batch.device:
        seeds = (seeds.pin_memory() if batch.is_cuda else seeds).to(batch.device, non_blocking=True)
    if engine.run_batch is not None:
        mark("forward and backward")
        totals = engine.run_batch(batch, seeds)
        mark("reducing the loss")
        torch.distributed.all_reduce(totals)
        return engine.step(totals[0], ~torch.isfinite(totals).all() | (totals[0] > highest))
    totals = torch.zeros(2, device=batch.device)
    if routing is not None:
        routing.begin()
    for number, tokens in enumerate(batch, 1):
        is_last, seeds_b = number == len(batch), None if seeds is None else seeds[number - 1]
        # all ranks mark the same phases, also if a capture has failed on one of them
        mark("forward")
        if graphs is not None and replays:
            passes = graphs.run(tokens, seeds_b, is_first=number == 1)
        else:
            passes, loss = run_forward(engine, tokens, seeds_b, z_loss, observer)
        totals += passes.sums
        if routing is not None and passes.routing is not None:
            routing.add(passes.routing)
        skip = None
        if is_last:
            mark("reducing the loss")
            torch.distributed.all_reduce(totals)
            skip = ~torch.isfinite(totals).all() | (totals[0] > highest)
        mark("backward")
        if replays:
            engine.reduce()
        else:
            if skip is not None:
                # ZeRO 1 to 3 skip a non-finite gradient: all ranks then agree, and the host need not wait here
                loss = loss * torch.where(skip, math.nan, 1.0)
            engine.backward(loss * plan.loss_factor)
        nll = engine.step(totals[0] if is_last else None, skip)
    if routing is not None:
        routing.end(engine.step_applied())
    return nll
