"""Learning-rate schedules: the factor on the peak rate as a pure function of the applied updates."""

import math

from depthlm.config import Config
from depthlm.config.schema import Schedule
from depthlm.training.plan import Plan


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
