"""The command `depthlm train`, or `python train.py`: its command line, and the training of a run or of a sweep.

Hydra composes the points of a sweep, and depthlm.training trains.
"""

import argparse
import math
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig

import depthlm
from depthlm.commands.exits import exit_on_mistake
from depthlm.commands.help import print_help
from depthlm.config import Config, changes, read_sources
from depthlm.config.compose import compose
from depthlm.config.hydra_context import config_dir_of, flags_parser, open_names
from depthlm.config.names import by_name, experiment_of
from depthlm.config.resolve import LENGTHS
from depthlm.config.saved import config_text
from depthlm.counts import format_count
from depthlm.distributed.launchers import is_rank_0, ranks
from depthlm.errors import ConfigError, UserError
from depthlm.locations import CONF
from depthlm.run_directory import RunDirectory
from depthlm.streams import continue_without_output, printable
from depthlm.sweeps.points import check_points, is_axis, parse_value, plain_points, sweep_points

# settings of Hydra that depthlm decides, and what to use instead
FIXED = {
    "hydra.run.dir=": "the run directory is output_dir=",
    "hydra.output_subdir=": "the run directory is output_dir=, which contains config.yaml",
    "hydra.job.chdir=": "paths are relative to the folder of the command; give output_dir=",
    "hydra/launcher=slurm": "there is no such launcher; slurm/submit.py submits a sweep to SLURM as a job array",
}


@dataclass(frozen=True)
class CommandLine:
    """The command line of train.py.

    completion: whether a shell requests completions. shows: whether to show the configuration instead of training.
    hydra: the arguments passed to Hydra.
    """

    overrides: list[str]
    config_dir: str | None
    multirun: bool
    shows: bool
    completion: bool
    hydra: list[str]


def main(arguments: list[str], program: str) -> None:
    """Train a run, or each point of a sweep. Ends the process with the exit code of the run."""
    line = read_command_line(arguments)
    continue_without_output()
    if not line.completion:
        config = check_command_line(line)
        if config is not None:
            train_run(config, line, program)
    import hydra

    # Hydra reads the command line of the process
    sys.argv[1:] = line.hydra
    hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(train_point)()


def read_command_line(arguments: Sequence[str]) -> CommandLine:
    """Parse the command line. For --help and --version, print the text and exit with code 0.

    Raises UserError for invalid flags.
    """
    # DeepSpeed's launcher adds --local_rank, which Hydra's parser rejects; the environment has the same value
    arguments = [argument for argument in arguments if not argument.startswith(("--local_rank=", "--local-rank="))]
    if "--help" in arguments or "-h" in arguments:
        flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        flags.add_argument("--config-dir", "-cd")
        flag_values, others = flags.parse_known_args(arguments)
        print_help([topic for topic in others if not topic.startswith("-")], flag_values.config_dir)
        sys.exit(0)
    if "--version" in arguments:
        print(f"depthlm {depthlm.__version__}")
        sys.exit(0)
    # Hydra's modes (--cfg, --info, ...) show a configuration without running it
    parsed, unknown = flags_parser().parse_known_intermixed_args(arguments)
    if unknown and not parsed.shell_completion:
        flags_or_words = [text for text in unknown if text.startswith("-")] or unknown
        raise UserError(f"{' '.join(flags_or_words)}: no such flag; settings are key=value, and --help lists them")
    if parsed.config_name or parsed.config_path:
        raise UserError(
            "--config-name and --config-path: the configuration is conf/config.yaml; add to it by --config-dir"
        )
    modes = {"--run": parsed.run, "-m": parsed.multirun, "--cfg": parsed.cfg, "--info": parsed.info}
    if len(given := [flag for flag, value in modes.items() if value]) > 1:
        raise UserError(f"{' and '.join(given)}: give only one of them")
    if parsed.resolve and not parsed.cfg:
        raise UserError("--resolve: only valid with --cfg job")
    if parsed.info and not read_sources(parsed.overrides).from_scratch:
        raise UserError(
            "--info: not with run= or config=, which Hydra does not compose; --cfg job prints the configuration"
        )
    return CommandLine(
        overrides=parsed.overrides,
        config_dir=parsed.config_dir,
        multirun=parsed.multirun,
        shows=bool(parsed.cfg or parsed.info),
        completion=parsed.shell_completion,
        # flags first, because Hydra accepts none between the overrides
        hydra=open_names(sorted(arguments, key=parsed.overrides.__contains__), settings=parsed.multirun),
    )


def check_command_line(line: CommandLine) -> Config | None:
    """Return the configuration of a run, or None for a sweep.

    Raises UserError with all mistakes in the overrides, including those of every point of a sweep.
    """
    errors = [f"{text}: {why}" for text in line.overrides for key, why in FIXED.items() if text.startswith(key)]
    if not line.multirun and read_sources(line.overrides).from_scratch:
        errors += _experiment_errors(line)
    if errors and not line.multirun:
        raise ConfigError(errors)
    if not line.multirun:
        return compose(line.overrides, line.config_dir)
    if ranks().world_size > 1:
        raise UserError("-m under several ranks would run the whole sweep on each rank; launch one point at a time")
    # another sweeper chooses its own points, and may write its database to outputs/ before the first run
    other_sweeper = any(text.startswith("hydra/sweeper=") for text in line.overrides)
    checked = [text for text in line.overrides if not text.startswith(tuple(FIXED))]
    try:
        check_points([text for text in checked if not (other_sweeper and is_axis(text))], line.config_dir)
    except ConfigError as error:
        raise ConfigError([*errors, *error.errors]) from None
    if errors:
        raise ConfigError(errors)
    if other_sweeper:
        Path("outputs").mkdir(exist_ok=True)
    return None


def train_run(config: Config, line: CommandLine, program: str) -> None:
    """Train the run of the command line, and end the process with its exit code.

    Returns if Hydra itself must compose it: to show the configuration, or because of overrides of Hydra's settings.
    """
    sources = read_sources(line.overrides)
    if sources.from_scratch and (line.shows or any(text.startswith("hydra") for text in line.overrides)):
        return
    if line.shows:
        print(config_text(config), end="")
        sys.exit(0)
    run = sources.run
    changed = {} if run is None else changes(run, config)
    if changed and is_rank_0():
        exists = RunDirectory.of(config.output_dir).config.is_file()
        which = "the run" if exists else "a new run, from scratch,"
        print(f"{program}: {which} in {config.output_dir}; differences from {run}:")
        print(printable("\n".join(f"  - {name}: {words}" for name, words in changed.items())), flush=True)
        if changed.keys() <= {*LENGTHS} and not exists:
            print(f"Add resume=extend to train {run} itself longer.", flush=True)
    _train_and_exit(config)


def train_point(raw: DictConfig) -> float | None:
    """Train one point. In a sweep, return its validation loss, or infinity if it failed.

    In a sweep, an error is printed and does not stop the other points.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from depthlm.config import resolve_and_check
    from depthlm.runs.records import read_run
    from depthlm.training import FAILED, STOPPED, train

    application = HydraConfig.get()
    overrides, config_dir = list(application.overrides.task), config_dir_of(application)
    if application.mode == RunMode.RUN:
        exit_on_mistake("train.py", lambda: _train_and_exit(resolve_and_check(raw, overrides, config_dir)))
    try:
        config = resolve_and_check(raw, overrides, config_dir)
        code = train(config)
    except UserError as error:
        _print_once(printable(f"train.py: {error}"))
        return math.inf
    except Exception:
        traceback.print_exc()
        return math.inf
    if code == STOPPED:
        sys.exit(STOPPED)
    return math.inf if code == FAILED else read_run(config.output_dir or "").number("validation_loss")


def _train_and_exit(config: Config) -> NoReturn:
    from depthlm.training import FAILED, train

    try:
        code = train(config)
    except (UserError, BrokenPipeError):
        raise
    except Exception:
        # what the system refuses to a run is no mistake of its command, which a scheduler may start again
        sys.excepthook(*sys.exc_info())
        code = FAILED
    sys.exit(code)


_printed: set[str] = set()


def _print_once(message: str) -> None:
    """Print the error of a point of a sweep; only its first line if an earlier point had the same error."""
    print(f"{message.splitlines()[0][:100]} ... as above" if message in _printed else message, file=sys.stderr)
    _printed.add(message)


def _experiment_errors(line: CommandLine) -> list[str]:
    """Return an error for an experiment without -m, unless the overrides are those of one of its points."""
    name = experiment_of(line.overrides)
    if name is None:
        return []

    def values(overrides: Sequence[str]) -> dict[str, Any]:
        return {key: parse_value(text) for key, text in by_name(overrides).items()}

    points = sweep_points(line.overrides, line.config_dir)
    if not points or any(values(point.overrides) == values(line.overrides) for point in points):
        return []
    examples = plain_points(line.overrides, line.config_dir)
    example = " ".join(text for text in examples[0] if text not in line.overrides)
    count = format_count(len(examples), "point")
    return [f"experiment={name}: {count}; add -m to train each, or choose one, as in {example}"]
