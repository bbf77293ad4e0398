"""How long a run is, in steps."""

import math

from depthlm.config.schema import Config


def run_steps(config: Config) -> int:
    """Steps of the whole run; `max_tokens` is rounded up to whole steps."""
    training = config.training
    if training.max_steps is not None:
        return training.max_steps
    assert training.max_tokens is not None
    return math.ceil(training.max_tokens / (training.batch_size * training.sequence_length))


def warmup_steps(config: Config) -> int:
    """Steps of the linear warm-up."""
    schedule = config.schedule
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return round((schedule.warmup_ratio or 0.0) * run_steps(config))
