"""Configuration: the schema, and the way from overrides to one checked `Config`."""

from depthlm.config.compose import compose, finish, mechanisms
from depthlm.config.errors import ConfigError
from depthlm.config.length import run_steps, warmup_steps
from depthlm.config.prepare_command import prepare_command
from depthlm.config.schema import Config

__all__ = ["Config", "ConfigError", "compose", "finish", "mechanisms", "prepare_command", "run_steps", "warmup_steps"]
