"""The schema of a configuration: its keys, types and documentation."""

from depthlm.config.schema.config import (
    SHARD_TOKENS,
    Config,
    Data,
    Model,
    Optimizer,
    Precision,
    Schedule,
    Source,
    Tracker,
    Training,
)
from depthlm.config.schema.deepspeed import DeepSpeed

__all__ = [
    "SHARD_TOKENS",
    "Config",
    "Data",
    "DeepSpeed",
    "Model",
    "Optimizer",
    "Precision",
    "Schedule",
    "Source",
    "Tracker",
    "Training",
]
