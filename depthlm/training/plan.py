"""Numbers derived from a configuration: the plan of a run, and its learning rates."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from depthlm.config import Config, ConfigError, run_steps, warmup_steps
from depthlm.config.schema import Schedule
from depthlm.config.validate.checks import check_steps
from depthlm.distributed.launchers import Ranks


@dataclass(frozen=True)
class Plan:
    """Batch sizes (in sequences), lengths (in tokens) and steps of a run.

    stages: the adjacent ranks of a pipeline. replicas: the number of pipelines, or of ranks without one.
    """

    world_size: int
    stages: int
    batch_size: int
    micro_batch_size: int
    accumulation: int
    sequence_length: int
    tokens_per_step: int
    max_steps: int
    warmup_steps: int
    total_tokens: int
    last_step: int

    @property
    def replicas(self) -> int:
        return self.world_size // self.stages

    @property
    def loss_factor(self) -> float:
        """The factor of a micro-batch's summed loss: the gradient is that of the mean over the global batch's tokens.

        The engine divides by the accumulation steps and averages over the replicas, so it has both.
        """
        return self.accumulation * self.replicas / self.tokens_per_step


def make_plan(config: Config, ranks: Ranks, windows: int | None = None) -> Plan:
    """Return the plan of a validated configuration on these ranks.

    windows: the number of training sequences, needed for training.max_epochs.
    Raises ConfigError if the schedule does not fit into training.max_epochs.
    """
    training = config.training
    share = training.batch_size // training.pipeline.replicas(ranks.world_size)
    micro_batch_size = training.micro_batch_size or share
    steps = run_steps(config, windows)
    assert steps is not None
    if errors := check_steps(config, steps):
        raise ConfigError(errors)
    tokens_per_step = training.batch_size * training.sequence_length
    return Plan(
        world_size=ranks.world_size,
        stages=training.pipeline.stages,
        batch_size=training.batch_size,
        micro_batch_size=micro_batch_size,
        accumulation=share // micro_batch_size,
        sequence_length=training.sequence_length,
        tokens_per_step=tokens_per_step,
        max_steps=steps,
        warmup_steps=warmup_steps(config, steps),
        total_tokens=steps * tokens_per_step,
        last_step=min(steps, training.stop_after or steps),
    )


class Due(NamedTuple):
    """What follows a step; the same on all ranks. last: no step of this process follows. interval_ends: a row ends the
    logging interval; the settings and the step alone decide it. written: the checkpoint being written is on the disk.
    """

    last: bool
    stop: bool
    save: bool
    validate: bool
    interval_ends: bool
    written: bool


def is_multiple(step: int, every: int | None) -> bool:
    """Return whether something that is done every so many steps, or never, is done at this step."""
    return every is not None and step % every == 0


def learning_rate(config: Config, plan: Plan, updates: int) -> float:
    """Return the learning rate of the update that follows `updates` applied ones; skipped batches do not count."""
    return config.optimizer.lr * lr_factor(config.schedule, updates, plan.warmup_steps, plan.max_steps)


def lr_factor(schedule: Schedule, updates: int, warmup_steps: int, max_steps: int) -> float:
    """Return the factor in [0, 1] for the update that follows `updates` applied ones (0 for the first).

    Warm-up is linear and reaches 1 at update `warmup_steps`. After it, with t the completed share of the rest and the
    floor `min_lr_ratio`: cosine: floor + (1 - floor) (1 + cos(pi t)) / 2; inverse_sqrt: sqrt(warmup / update), at least
    the floor; wsd: 1, then linear to the floor over the last `decay_ratio` of the run (arXiv 2404.06395); constant: 1.
    """
    update = updates + 1
    if update < warmup_steps:
        return update / warmup_steps
    floor = schedule.min_lr_ratio
    if schedule.name == "cosine":
        progress = (update - warmup_steps) / max(1, max_steps - warmup_steps)
        return floor + (1 - floor) * (1 + math.cos(math.pi * min(1.0, progress))) / 2
    if schedule.name == "inverse_sqrt":
        return max(floor, math.sqrt(warmup_steps / update))
    if schedule.name == "wsd":
        decay_steps = round(schedule.decay_ratio * max_steps)
        remaining = max_steps - update
        return 1.0 if remaining >= decay_steps else floor + (1 - floor) * remaining / decay_steps
    return 1.0
