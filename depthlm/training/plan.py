"""What follows from a configuration, computed once and printed before step one."""

from dataclasses import dataclass

from depthlm.config import Config, run_steps, warmup_steps
from depthlm.environment import Ranks


@dataclass(frozen=True)
class Plan:
    """The arithmetic of a run. Batches in sequences, lengths in tokens."""

    world_size: int
    batch_size: int
    micro_batch_size: int
    accumulation: int
    sequence_length: int
    tokens_per_step: int
    max_steps: int
    warmup_steps: int
    total_tokens: int
    last_step: int


def make_plan(config: Config, ranks: Ranks) -> Plan:
    """The plan of a checked configuration on these ranks."""
    training = config.training
    share = training.batch_size // ranks.world_size
    micro_batch_size = training.micro_batch_size or share
    steps = run_steps(config)
    tokens_per_step = training.batch_size * training.sequence_length
    return Plan(
        world_size=ranks.world_size,
        batch_size=training.batch_size,
        micro_batch_size=micro_batch_size,
        accumulation=share // micro_batch_size,
        sequence_length=training.sequence_length,
        tokens_per_step=tokens_per_step,
        max_steps=steps,
        warmup_steps=warmup_steps(config),
        total_tokens=steps * tokens_per_step,
        last_step=min(steps, training.stop_after or steps),
    )
