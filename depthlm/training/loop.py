"""The training loop: read batches, update the weights, log metrics, validate and save checkpoints."""

import logging
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from depthlm.config import Config
from depthlm.distributed.collectives import on_any_rank
from depthlm.distributed.signals import StopRequest
from depthlm.model.observer import UNOBSERVED, Observer
from depthlm.training.engine import Engine
from depthlm.training.monitoring.display import Bar, measured_text, row_text
from depthlm.training.monitoring.metrics import Stopwatch, finite, peak_memory_gib
from depthlm.training.monitoring.profiling import Profiler
from depthlm.training.monitoring.sublayer_norms import BlockMeter
from depthlm.training.nonfinite import handle_nonfinite, spike_limit
from depthlm.training.plan import Plan
from depthlm.training.schedules import lr_factor
from depthlm.training.state import Progress, Run
from depthlm.training.validation import ValidationStopped

log = logging.getLogger("depthlm")


def train_steps(run: Run, progress: Progress, request: StopRequest) -> bool:
    """Train from `progress` to the plan's last step and save a checkpoint. Returns False if a signal stopped it early.

    Raises DivergedError if non-finite losses or gradients end the run, and ValidationStopped if a signal interrupts a
    validation, after the state has been saved.
    """
    config, plan, engine = run.config, run.plan, run.engine
    step_timer = Stopwatch(progress.wall_seconds)
    is_rank_0 = torch.distributed.get_rank() == 0
    profiler = Profiler(run.directory) if config.training.profile and is_rank_0 else None
    logged_at = progress.step
    if on_any_rank((request.name is not None,), run.device)[0]:
        return False  # the signal came while the run was starting
    request.training = True
    if (
        run.metrics.last.get("step") == progress.step
        and validation_due(config, plan, progress.step)
        and not run.metrics.validated
    ):
        validate(run)  # the previous process ended between this checkpoint and its validation
        run.tracker.write(run.metrics.last)
    with Bar(progress.step, plan.last_step, torch.distributed.get_rank()) as bar:
        step_timer.start()
        while progress.step < plan.last_step:
            mark = partial(run.watch.mark, step=progress.step + 1)
            mark("reading the batch")
            batch = next(run.batches)
            learning_rate = next_learning_rate(config, plan, progress)
            engine.set_learning_rate(learning_rate)
            # seeding every step makes random draws depend on the step alone, so resuming needs no generator state
            torch.manual_seed(hash((config.seed, progress.step, torch.distributed.get_rank())) % 2**63)
            scale = engine.loss_scale  # read before the step, which may change it
            limit = spike_limit(config.training, progress.recent_losses, plan.tokens_per_step)
            highest = limit if config.training.on_spike == "skip" else math.inf
            batch = batch.to(run.device, non_blocking=True)
            meter = block_meter(run, progress.step + 1)
            nll = train_step(engine, batch, plan, config.training.z_loss, highest, mark, meter or UNOBSERVED).item()
            progress.step += 1
            if meter is not None:
                run.blocks.write({"step": progress.step, **meter.row(scale)})
            progress.tokens += plan.tokens_per_step
            bar.step(progress.step)
            mark("synchronizing ranks")
            handle_nonfinite(run, progress, nll, limit, scale)
            flags = (request.name is not None, run.saver.due(), run.saver.busy())
            stopping, due, writing = on_any_rank(flags, run.device)
            ending = stopping or progress.step == plan.last_step
            saving = ending or due or _due(progress.step, config.training.checkpoint_every)
            validating = validation_due(config, plan, progress.step)
            if saving or validating or progress.step == 1 or _due(progress.step, config.training.log_every):
                steps_per_second = (progress.step - logged_at) / step_timer.take_lap()
                row = measure(run, progress, nll, learning_rate, steps_per_second) | {"loss_scale": scale}
                logged_at = progress.step
                bar.row(row)
                log.info("%s", row_text(row, plan.max_steps))
                run.metrics.write(row)
            step_timer.pause()
            progress.wall_seconds = step_timer.total
            if run.saver.writing is not None and not writing:
                run.saver.finish()
            if saving:
                # save before validation, so that a failure there loses no training
                progress.wandb_id = run.tracker.id
                mark("saving")
                run.saver.save(asdict(progress), last=ending)
            if validating:
                mark("validating")
                try:
                    validate(run)
                except ValidationStopped:
                    if not saving or run.saver.writing is not None:
                        mark("saving")
                        run.saver.save(asdict(progress), last=True)
                    raise
            if run.metrics.last.get("step") == progress.step:
                run.tracker.write(run.metrics.last)
            if profiler is not None:
                profiler.step(last=ending)
            if stopping:
                break
            step_timer.start()
    if profiler is not None:
        profiler.close()
    return progress.step >= plan.last_step


def validation_due(config: Config, plan: Plan, step: int) -> bool:
    """Return whether a validation follows this step; the last step of the run always has one."""
    return _due(step, config.training.validate_every) or step == plan.max_steps


def validate(run: Run) -> None:
    """Add the validation losses and the mechanism's diagnostics to the newest row of metrics."""
    measured = run.validate() | run.diagnose()
    run.metrics.amend(measured)
    log.info("%s", measured_text(measured))


def train_step(
    engine: Engine,
    batch: torch.Tensor,
    plan: Plan,
    z_loss: float,
    highest: float = math.inf,
    mark: Callable[[str], None] = lambda phase: None,
    observer: Observer = UNOBSERVED,
) -> torch.Tensor:
    """Take one step on batch [accumulation, micro_batch, T + 1]. Returns the token losses summed over all ranks (nats).

    The loss is divided by the number of tokens in the global batch. The engine divides by the accumulation steps and
    averages over the ranks, so the loss is multiplied by both. If the summed loss is not finite, or above `highest`,
    the update is skipped. mark: called with each phase of the step. observer: sees every micro-batch.
    """
    totals = torch.zeros(2, device=batch.device)
    scale = plan.accumulation * plan.world_size / plan.tokens_per_step
    for number, tokens in enumerate(batch, 1):
        mark("forward")
        sums = engine(tokens[:, :-1], tokens[:, 1:], observer)
        loss = sums.nll + z_loss * sums.z if z_loss else sums.nll
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
    return totals[0]


def next_learning_rate(config: Config, plan: Plan, progress: Progress) -> float:
    """Return the learning rate of the next update: the schedule counts applied updates, not batches."""
    applied = progress.step - len(progress.skipped)
    return config.optimizer.lr * lr_factor(config.schedule, applied, plan.warmup_steps, plan.max_steps)


def measure(run: Run, progress: Progress, nll: float, learning_rate: float, steps_per_second: float) -> dict[str, Any]:
    """Return a row of metrics.jsonl. nll: the summed loss of the global batch (nats). Non-finite values are None."""
    tokens_per_second = steps_per_second * run.plan.tokens_per_step
    flops_per_second = tokens_per_second * run.flops_per_token / run.plan.world_size
    seen = run.seen(progress.step) if run.seen is not None else {}
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "loss": finite(nll / run.plan.tokens_per_step),
        "learning_rate": learning_rate,
        "grad_norm": finite(run.engine.grad_norm()),
        "tokens_per_second": tokens_per_second,
        "mfu": flops_per_second / run.peak_flops if run.peak_flops else None,
        "peak_memory_gib": peak_memory_gib(run.device),
        **{f"data/{name}/share": share for name, (share, _) in seen.items()},
        **{f"data/{name}/epochs": epochs for name, (_, epochs) in seen.items()},
    }


def block_meter(run: Run, step: int) -> BlockMeter | None:
    """Return the meter of sublayer norms for this step; None unless training.log_blocks_every asks for one."""
    every = run.config.training.log_blocks_every
    if every is None or (step != 1 and step % every):
        return None
    return BlockMeter(run.config.model.loops * run.config.size.num_layers, run.device)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
