"""Configuration: the schema, and the composition of overrides into a checked `Config`."""

from depthlm.config.compose import compose, mechanisms, resolve_and_check
from depthlm.config.from_run import changes, read_sources
from depthlm.config.protocol import prepare_command
from depthlm.config.schema import Config, run_steps, warmup_steps
from depthlm.errors import ConfigError

__all__ = [
    "Config",
    "ConfigError",
    "changes",
    "compose",
    "mechanisms",
    "prepare_command",
    "read_sources",
    "resolve_and_check",
    "run_steps",
    "warmup_steps",
]
