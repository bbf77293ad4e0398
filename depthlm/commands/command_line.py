"""The command line of train.py before Hydra sees it: help, and every mistake at once."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.utils import get_args_parser

import depthlm
from depthlm.commands.help import print_help
from depthlm.config.compose import compose
from depthlm.config.from_run import run_of
from depthlm.config.resolve import by_name, experiment_of
from depthlm.config.schema.sources import open_names
from depthlm.config.validate.errors import ConfigError
from depthlm.distributed.launchers import ranks
from depthlm.errors import UserError
from depthlm.locations import install_command
from depthlm.sweeps.points import check_points, is_axis, sweep_points

# what comes with an extra: the override, its module and the extra
PLUGINS = (
    ("hydra/launcher=slurm", "hydra_submitit_launcher", "slurm"),
    ("hydra/sweeper=optuna", "hydra_optuna_sweeper", "tune"),
    ("hydra/sweeper=learning_rate", "hydra_optuna_sweeper", "tune"),
)

# what depthlm decides, and a setting of Hydra's would only seem to
FIXED = {
    "hydra.run.dir": "the run directory is output_dir=",
    "hydra.output_subdir": "the run directory is output_dir=, and holds config.yaml",
    "hydra.job.chdir": "paths are relative to the folder of the command; give output_dir=",
}


@dataclass(frozen=True)
class CommandLine:
    """The command line of train.py.

    completion: whether a shell asks for completions. cfg: what Hydra is to print instead of running. hydra: the
    arguments that Hydra is given.
    """

    overrides: list[str]
    config_dir: str | None
    multirun: bool
    cfg: str | None
    completion: bool
    hydra: list[str]


def read_command_line(arguments: Sequence[str]) -> CommandLine:
    """The command line, unless it asks for help or a version, which are printed and end the process with 0.

    Raises UserError for a flag that is wrong.
    """
    # DeepSpeed's launcher adds --local_rank, which Hydra's parser refuses; the environment says the same.
    kept = [argument for argument in arguments if not argument.startswith(("--local_rank=", "--local-rank="))]
    if "--help" in kept or "-h" in kept:
        flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        flags.add_argument("--config-dir", "-cd")
        given, others = flags.parse_known_args(kept)
        print_help([topic for topic in others if not topic.startswith("-")], given.config_dir)
        sys.exit(0)
    if "--version" in kept:
        print(f"depthlm {depthlm.__version__}")
        sys.exit(0)
    # Hydra's own modes (--cfg, --info, ...) look at a configuration without running it.
    parsed, unknown = get_args_parser().parse_known_args(kept)
    if unknown and not parsed.shell_completion:
        raise UserError(f"{' '.join(unknown)}: no such flag; settings are key=value, and --help lists them")
    if parsed.config_name or parsed.config_path:
        raise UserError(
            "--config-name and --config-path: the configuration is conf/config.yaml; add to it by --config-dir"
        )
    if parsed.resolve and not parsed.cfg:
        raise UserError("--resolve: goes with --cfg job")
    if parsed.info and run_of(parsed.overrides) is not None:
        raise UserError("--info: not with run=, which Hydra does not compose; --cfg job prints the configuration")
    return CommandLine(
        overrides=parsed.overrides,
        config_dir=parsed.config_dir,
        multirun=parsed.multirun,
        cfg=parsed.cfg,
        completion=parsed.shell_completion,
        hydra=open_names(kept, settings=parsed.multirun),
    )


def check_command_line(line: CommandLine) -> None:
    """Raise UserError with every mistake in the overrides, of every point of a sweep."""
    errors = [f"{text}: {why}" for text in line.overrides for key, why in FIXED.items() if text.startswith(f"{key}=")]
    if not line.multirun:
        errors += _several_points(line)
    if errors:
        raise ConfigError(errors)
    if not line.multirun:
        compose(line.overrides, line.config_dir)
        return
    if ranks().world_size > 1:
        raise UserError("-m under several ranks would run the whole sweep in each of them: start one point a launch")
    for group, plugin, extra in PLUGINS:
        if group in line.overrides and importlib.util.find_spec(f"hydra_plugins.{plugin}") is None:
            raise UserError(f"{group}: not installed; {install_command(extra)}")
    # another sweeper makes points of its own, and may keep what it knows there before there is a run
    other = any(text.startswith("hydra/sweeper=") for text in line.overrides)
    check_points([text for text in line.overrides if not (other and is_axis(text))], line.config_dir)
    if other:
        Path("outputs").mkdir(exist_ok=True)


def _several_points(line: CommandLine) -> list[str]:
    """What is wrong with an experiment that is given without -m, unless the overrides are one of its points."""
    name = experiment_of(line.overrides)
    if name is None:
        return []
    points = sweep_points(line.overrides, line.config_dir)
    if len(points) <= 1 or any(by_name(point.overrides) == by_name(line.overrides) for point in points):
        return []
    first = " ".join(text for text in points[0].overrides if text not in line.overrides)
    return [f"experiment={name}: {len(points)} points; add -m to train each, or choose one, as in {first}"]
