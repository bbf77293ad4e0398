"""The loop: batches in, updates out, rows of metrics, validation and checkpoints on the way."""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from depthlm.config import Config
from depthlm.training.checkpoints import save_checkpoint
from depthlm.training.display import Bar, measured_text, row_text
from depthlm.training.engine import loss_scale
from depthlm.training.metrics import MetricsFile, Stopwatch, peak_memory_gib
from depthlm.training.optimizers import set_learning_rate
from depthlm.training.plan import Plan
from depthlm.training.profiling import Profiler
from depthlm.training.schedules import lr_factor
from depthlm.training.signals import StopRequest
from depthlm.training.trackers import Tracker

log = logging.getLogger("depthlm")


class DivergedError(RuntimeError):
    """More batches in a row with a loss or gradient that is not finite than the run allows."""


@dataclass
class Progress:
    """How far a run is: all that resuming needs besides the engine's state."""

    step: int = 0
    tokens: int = 0
    skipped: list[int] = field(default_factory=list)
    wall_seconds: float = 0.0
    wandb_id: str | None = None
    corpus: str = ""
    world_size: int = 1


@dataclass(frozen=True)
class Run:
    """What the loop works with. parameters: how many the model has.

    seen: of each source of a mixture after so many steps, its share of the samples and its epochs.
    """

    config: Config
    plan: Plan
    directory: Path
    engine: Any
    device: torch.device
    batches: Iterator[torch.Tensor]
    seen: Callable[[int], dict[str, tuple[float, float]]] | None
    validate: Callable[[], dict[str, float | None]]
    diagnose: Callable[[], dict[str, float | None]]
    parameters: int
    flops_per_token: float
    peak_flops: float | None
    metrics: MetricsFile
    tracker: Tracker


def train_steps(run: Run, progress: Progress, request: StopRequest) -> bool:
    """Train from `progress` to the plan's last step; False if a signal ended it earlier. A checkpoint ends both.

    Raises DivergedError after `training.max_skipped` bad batches in a row.
    """
    config, plan, engine = run.config, run.plan, run.engine
    watch = Stopwatch(progress.wall_seconds)
    first_rank = torch.distributed.get_rank() == 0
    profiler = Profiler(run.directory) if config.training.profile and first_rank else None
    logged_at, skipped_in_a_row = progress.step, 0
    if (
        run.metrics.last.get("step") == progress.step
        and validation_due(config, plan, progress.step)
        and not run.metrics.validated
    ):
        validate(run)  # the run was killed between a checkpoint and its validation
    with Bar(progress.step, plan.last_step, torch.distributed.get_rank()) as bar:
        watch.start()
        while progress.step < plan.last_step:
            batch = next(run.batches)
            learning_rate = next_learning_rate(config, plan, progress)
            set_learning_rate(engine.optimizer, learning_rate)
            # whatever a mechanism draws is then a function of the step alone, and resuming needs no generator's state
            torch.manual_seed(hash((config.seed, progress.step, torch.distributed.get_rank())) % 2**63)
            scale = loss_scale(engine)  # the step's own: DeepSpeed changes it at the end of one
            nll = train_step(engine, batch.to(run.device, non_blocking=True), plan, config.training.z_loss)
            progress.step += 1
            progress.tokens += plan.tokens_per_step
            bar.step(progress.step)
            if engine.was_step_applied():
                skipped_in_a_row = 0
            else:
                progress.skipped.append(progress.step)
                skipped_in_a_row += 1
                log.warning("step %d left out: its gradient is not finite", progress.step)
                if skipped_in_a_row > config.training.max_skipped:
                    raise DivergedError(
                        f"{skipped_in_a_row} batches in a row without a finite gradient (training.max_skipped="
                        f"{config.training.max_skipped}); lower optimizer.lr, and give another output_dir="
                    )
            stopping = request.agreed(run.device)
            ending = stopping or progress.step == plan.last_step
            saving = ending or _due(progress.step, config.training.checkpoint_every)
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
            if saving:
                # before validation, so that what fails there loses nothing
                progress.wandb_id = run.tracker.id
                log.info(
                    "saved %s", save_checkpoint(engine, run.directory, asdict(progress), config.training.keep_last)
                )
            if validating:
                validate(run)
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


def train_step(engine: Any, batch: torch.Tensor, plan: Plan, z_loss: float) -> torch.Tensor:
    """One update from batch [accumulation, micro_batch, T + 1]. Returns this rank's sum of token losses (nats).

    The loss is divided by the tokens of the whole batch. DeepSpeed divides by the accumulation and averages over the
    ranks, so both are multiplied back in.
    """
    total = torch.zeros((), device=batch.device)
    scale = plan.accumulation * plan.world_size / plan.tokens_per_step
    for tokens in batch:
        sums = engine(tokens[:, :-1], tokens[:, 1:])
        loss = sums.nll + z_loss * sums.z if z_loss else sums.nll
        engine.backward(loss * scale)
        engine.step()
        total += sums.nll.detach()
    return total


def next_learning_rate(config: Config, plan: Plan, progress: Progress) -> float:
    """The rate of the next update: the schedule counts applied updates, not batches."""
    applied = progress.step - len(progress.skipped)
    return config.optimizer.lr * lr_factor(config.schedule, applied, plan.warmup_steps, plan.max_steps)


def measure(
    run: Run, progress: Progress, nll: torch.Tensor, learning_rate: float, steps_per_second: float
) -> dict[str, Any]:
    """A row of metrics.jsonl; collective, since the loss is the whole batch's. What is not finite is null in it."""
    torch.distributed.all_reduce(nll)
    tokens_per_second = steps_per_second * run.plan.tokens_per_step
    flops_per_second = tokens_per_second * run.flops_per_token / run.plan.world_size
    norm = run.engine.get_global_grad_norm()
    loss = nll.item() / run.plan.tokens_per_step
    seen = run.seen(progress.step) if run.seen is not None else {}
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "loss": loss if math.isfinite(loss) else None,
        "learning_rate": learning_rate,
        "grad_norm": float(norm) if norm is not None and math.isfinite(norm) else None,
        "tokens_per_second": tokens_per_second,
        "mfu": flops_per_second / run.peak_flops if run.peak_flops else None,
        "peak_memory_gib": peak_memory_gib(run.device),
        **{f"data/{name}/share": share for name, (share, _) in seen.items()},
        **{f"data/{name}/epochs": epochs for name, (_, epochs) in seen.items()},
    }


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
