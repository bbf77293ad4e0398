"""The length of a run and of its warm-up, in steps."""

import math

from depthlm.config.schema import Config


def run_steps(config: Config, windows: int | None = None) -> int | None:
    """Return the steps of the whole run. `max_tokens` is rounded up to whole steps, `max_epochs` down to whole batches.

    windows: number of sequences in the training tokens; None if unknown, in which case `max_epochs` gives None.
    """
    training = config.training
    if training.max_steps is not None:
        return training.max_steps
    if training.max_epochs is not None:
        return None if windows is None else max(1, training.max_epochs * windows // training.batch_size)
    assert training.max_tokens is not None
    return math.ceil(training.max_tokens / (training.batch_size * training.sequence_length))


def warmup_steps(config: Config, steps: int) -> int:
    """Return the steps of the linear warm-up in a run of `steps` steps."""
    schedule = config.schedule
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return round((schedule.warmup_ratio or 0.0) * steps)
