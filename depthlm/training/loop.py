"""The loop: batches in, updates out, rows of metrics, validation and checkpoints on the way."""

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
from depthlm.training.engine.deepspeed import loss_scale
from depthlm.training.monitoring.display import Bar, measured_text, row_text
from depthlm.training.monitoring.metrics import Stopwatch, finite, peak_memory_gib
from depthlm.training.monitoring.profiling import Profiler
from depthlm.training.monitoring.sublayer_norms import BlockMeter
from depthlm.training.nonfinite import handle_nonfinite, spike_limit
from depthlm.training.optimizers import set_learning_rate
from depthlm.training.plan import Plan
from depthlm.training.schedules import lr_factor
from depthlm.training.state import Progress, Run
from depthlm.training.validation import ValidationStopped

log = logging.getLogger("depthlm")


def train_steps(run: Run, progress: Progress, request: StopRequest) -> bool:
    """Train from `progress` to the plan's last step; False if a signal ended it earlier. A checkpoint ends both.

    Raises DivergedError where non-finite numbers end the run, ValidationStopped where a signal ends a validation; all
    is saved then.
    """
    config, plan, engine = run.config, run.plan, run.engine
    watch = Stopwatch(progress.wall_seconds)
    first_rank = torch.distributed.get_rank() == 0
    profiler = Profiler(run.directory) if config.training.profile and first_rank else None
    logged_at = progress.step
    if on_any_rank((request.name is not None,), run.device)[0]:
        return False  # it came while the run was starting
    request.training = True
    if (
        run.metrics.last.get("step") == progress.step
        and validation_due(config, plan, progress.step)
        and not run.metrics.validated
    ):
        validate(run)  # the run ended between a checkpoint and its validation
        run.tracker.write(run.metrics.last)
    with Bar(progress.step, plan.last_step, torch.distributed.get_rank()) as bar:
        watch.start()
        while progress.step < plan.last_step:
            mark = partial(run.watch.mark, step=progress.step + 1)
            mark("reading the batch")
            batch = next(run.batches)
            learning_rate = next_learning_rate(config, plan, progress)
            set_learning_rate(engine.optimizer, learning_rate)
            # whatever a mechanism draws is then a function of the step alone, and resuming needs no generator's state
            torch.manual_seed(hash((config.seed, progress.step, torch.distributed.get_rank())) % 2**63)
            scale = loss_scale(engine)  # the step's own: DeepSpeed changes it at the end of one
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
            mark("agreeing")
            handle_nonfinite(run, progress, nll, limit, scale)
            flags = (request.name is not None, run.saver.due(), run.saver.busy())
            stopping, due, writing = on_any_rank(flags, run.device)
            ending = stopping or progress.step == plan.last_step
            saving = ending or due or _due(progress.step, config.training.checkpoint_every)
            validating = validation_due(config, plan, progress.step)
            if saving or validating or progress.step == 1 or _due(progress.step, config.training.log_every):
                steps_per_second = (progress.step - logged_at) / watch.take_lap()
                row = measure(run, progress, nll, learning_rate, steps_per_second) | {"loss_scale": scale}
                logged_at = progress.step
                bar.row(row)
                log.info("%s", row_text(row, plan.max_steps))
                run.metrics.write(row)
            watch.pause()
            progress.wall_seconds = watch.total
            if run.saver.writing is not None and not writing:
                run.saver.finish()
            if saving:
                # before validation, so that what fails there loses nothing
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
            watch.start()
    if profiler is not None:
        profiler.close()
    return progress.step >= plan.last_step


def validation_due(config: Config, plan: Plan, step: int) -> bool:
    """Whether a validation follows this step; the last of the whole run always has one."""
    return _due(step, config.training.validate_every) or step == plan.max_steps


def validate(run: Run) -> None:
    """Measure every validation set, and add losses and what the mechanism tells to the newest row of metrics."""
    measured = run.validate() | run.diagnose()
    run.metrics.amend(measured)
    log.info("%s", measured_text(measured))


def train_step(
    engine: Any,
    batch: torch.Tensor,
    plan: Plan,
    z_loss: float,
    highest: float = math.inf,
    mark: Callable[[str], None] = lambda phase: None,
    observer: Observer = UNOBSERVED,
) -> torch.Tensor:
    """One update from batch [accumulation, micro_batch, T + 1]. Returns the token losses of all ranks, summed (nats).

    The loss is divided by the tokens of the whole batch. DeepSpeed divides by the accumulation and averages over the
    ranks, so both are multiplied back in. Where the summed loss is not finite, or above `highest`, no update is made.
    mark: is told each phase of the step. observer: is shown every micro-batch.
    """
    totals = torch.zeros(2, device=batch.device)
    scale = plan.accumulation * plan.world_size / plan.tokens_per_step
    for number, tokens in enumerate(batch, 1):
        mark("forward")
        sums = engine(tokens[:, :-1], tokens[:, 1:], observer=observer)
        loss = sums.nll + z_loss * sums.z if z_loss else sums.nll
        totals += torch.stack((sums.nll.detach(), loss.detach()))
        if number == len(batch):
            mark("adding up the loss")
            torch.distributed.all_reduce(totals)
            bad = ~torch.isfinite(totals).all() | (totals[0] > highest)
            # every stage leaves out a gradient that is not finite: so all ranks agree, and the host need not wait here
            loss = loss * torch.where(bad, math.nan, 1.0)
        mark("backward")
        engine.backward(loss * scale)
        engine.step()
    return totals[0]


def next_learning_rate(config: Config, plan: Plan, progress: Progress) -> float:
    """The rate of the next update: the schedule counts applied updates, not batches."""
    applied = progress.step - len(progress.skipped)
    return config.optimizer.lr * lr_factor(config.schedule, applied, plan.warmup_steps, plan.max_steps)


def measure(run: Run, progress: Progress, nll: float, learning_rate: float, steps_per_second: float) -> dict[str, Any]:
    """A row of metrics.jsonl. nll: the loss of the whole batch (nats, summed). What is not finite is null."""
    tokens_per_second = steps_per_second * run.plan.tokens_per_step
    flops_per_second = tokens_per_second * run.flops_per_token / run.plan.world_size
    seen = run.seen(progress.step) if run.seen is not None else {}
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "loss": finite(nll / run.plan.tokens_per_step),
        "learning_rate": learning_rate,
        "grad_norm": finite(run.engine.get_global_grad_norm()),
        "tokens_per_second": tokens_per_second,
        "mfu": flops_per_second / run.peak_flops if run.peak_flops else None,
        "peak_memory_gib": peak_memory_gib(run.device),
        **{f"data/{name}/share": share for name, (share, _) in seen.items()},
        **{f"data/{name}/epochs": epochs for name, (_, epochs) in seen.items()},
    }


def block_meter(run: Run, step: int) -> BlockMeter | None:
    """What measures the sublayers in this step, where training.log_blocks_every asks for it."""
    every = run.config.training.log_blocks_every
    if every is None or (step != 1 and step % every):
        return None
    return BlockMeter(run.config.model.loops * run.config.size.num_layers, run.device)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
