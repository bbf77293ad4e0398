"""`depthlm train`, `python train.py`: Hydra composes the configuration, depthlm.training trains."""

import math
import sys
import traceback

from omegaconf import DictConfig

from depthlm.commands.command_line import CommandLine, check_command_line, read_command_line
from depthlm.config import Config, changes, run_of
from depthlm.config.saved import config_text
from depthlm.distributed.launchers import is_rank_0
from depthlm.errors import UserError
from depthlm.exits import exit_on_mistake
from depthlm.locations import CONF
from depthlm.streams import continue_without_output, printable


def main(arguments: list[str], program: str) -> None:
    """Train a run, or each point of a sweep. Ends the process with the exit code of the run."""
    continue_without_output()
    line = read_command_line(arguments)
    if not line.completion:
        config = check_command_line(line)
        if config is not None:
            train_run(config, line, program)
    import hydra

    # Hydra reads the command line of the process
    sys.argv[1:] = line.hydra
    hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(train_point)()


def train_run(config: Config, line: CommandLine, program: str) -> None:
    """Train the run of the command line, and end the process with its exit code.

    Returns if Hydra itself must compose it: to show the configuration, or because of overrides of Hydra's settings.
    """
    run = run_of(line.overrides)
    if run is None and (line.shows or any(text.startswith("hydra") for text in line.overrides)):
        return
    if line.shows:
        print(config_text(config), end="")
        sys.exit(0)
    changed = {} if run is None else changes(run, config)
    if changed and is_rank_0():
        print(f"{program}: a new run in {config.output_dir}; differences from {run}:")
        print(printable("\n".join(f"  - {name}: {words}" for name, words in changed.items())), flush=True)
    from depthlm.training import train

    sys.exit(train(config))


def train_point(raw: DictConfig) -> float | None:
    """Train one point. In a sweep, return its validation loss, or infinity if it failed."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from depthlm.config import resolve_and_check
    from depthlm.training import train

    application = HydraConfig.get()
    overrides = list(application.overrides.task)
    if application.mode == RunMode.RUN:
        exit_on_mistake("train.py", lambda: sys.exit(train(resolve_and_check(raw, overrides))))
    return point_of_sweep(raw, overrides)


def point_of_sweep(raw: DictConfig, overrides: list[str]) -> float | None:
    """Train one point of a sweep. An error is printed and does not stop the other points."""
    from depthlm.config import resolve_and_check
    from depthlm.runs.records import read_run
    from depthlm.training import FAILED, STOPPED, train

    try:
        config = resolve_and_check(raw, overrides)
        code = train(config)
    except UserError as error:
        print(printable(f"train.py: {error}"), file=sys.stderr)
        return math.inf
    except Exception:
        traceback.print_exc()
        return math.inf
    if code == STOPPED:
        sys.exit(STOPPED)
    return math.inf if code == FAILED else read_run(config.output_dir or "").number("validation_loss")
