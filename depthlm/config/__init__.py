"""Configuration: the schema, and the way from overrides to one checked `Config`."""

from depthlm.config.compose import compose, finish, mechanisms
from depthlm.config.errors import ConfigError
from depthlm.config.from_run import changes, run_of
from depthlm.config.length import run_steps, warmup_steps
from depthlm.config.prepare_command import given_config_dir, prepare_command
from depthlm.config.schema import Config
from depthlm.config.sweep import Point, check_points, load_experiment, point_directory, sweep_points

__all__ = [
    "Config", "ConfigError", "Point", "changes", "check_points", "compose", "finish", "given_config_dir",
    "load_experiment", "mechanisms", "point_directory", "prepare_command", "run_of", "run_steps", "sweep_points",
    "warmup_steps",
]  # fmt: skip
