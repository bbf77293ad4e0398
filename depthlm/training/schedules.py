"""Learning-rate schedules: the factor on the peak rate as a pure function of the applied steps."""

import math

from depthlm.config.schema import Schedule


def lr_factor(schedule: Schedule, step: int, warmup_steps: int, max_steps: int) -> float:
    """The factor for the update that follows `step` applied ones (0 for the first), in [0, 1].

    Warm-up is linear and reaches 1 at update `warmup_steps`. After it, with t the share of the rest that is done:
    cosine: floor + (1 - floor) (1 + cos(pi t)) / 2; inverse_sqrt: sqrt(warmup / update);
    wsd: 1, then linear to the floor over the last `decay_ratio` of the run (arXiv 2404.06395); constant: 1.
    """
    update = step + 1
    if update < warmup_steps:
        return update / warmup_steps
    floor = schedule.min_lr_ratio
    if schedule.name == "cosine":
        done = (update - warmup_steps) / max(1, max_steps - warmup_steps)
        return floor + (1 - floor) * (1 + math.cos(math.pi * min(1.0, done))) / 2
    if schedule.name == "inverse_sqrt":
        return max(floor, math.sqrt(warmup_steps / update))
    if schedule.name == "wsd":
        decay_steps = round(schedule.decay_ratio * max_steps)
        left = max_steps - update
        return 1.0 if left >= decay_steps else floor + (1 - floor) * left / decay_steps
    return 1.0
