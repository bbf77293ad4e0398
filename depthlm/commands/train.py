"""`depthlm train`, `python train.py`: the main job. Hydra composes, depthlm.training trains."""

import math
import sys
import traceback
from typing import TYPE_CHECKING

from depthlm.config.command_line import prepare_arguments
from depthlm.errors import UserError
from depthlm.exits import exit_on_mistake
from depthlm.locations import CONF

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main(arguments: list[str], program: str) -> None:
    """Train a run, or each point of a sweep; ends the process with the exit code of the run."""
    arguments = prepare_arguments(arguments)
    import hydra

    # Hydra reads the command line of the process
    sys.argv[1:] = arguments
    hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(train_point)()


def train_point(raw: "DictConfig") -> float | None:
    """Train one point. Of a sweep, returns its validation loss: infinity where it failed."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from depthlm.config import finish
    from depthlm.training import train

    application = HydraConfig.get()
    overrides = list(application.overrides.task)
    if application.mode == RunMode.RUN:
        exit_on_mistake("train.py", lambda: sys.exit(train(finish(raw, overrides))))
    return point_of_sweep(raw, overrides)


def point_of_sweep(raw: "DictConfig", overrides: list[str]) -> float | None:
    """Train one point; whatever goes wrong in it is printed and does not stop the others."""
    from depthlm.analysis.runs import read_run
    from depthlm.config import finish
    from depthlm.training import FAILED, STOPPED, hand_back, train

    try:
        config = finish(raw, overrides)
        code = train(config)
    except UserError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return math.inf
    except Exception:
        traceback.print_exc()
        return math.inf
    if code == STOPPED:
        hand_back()
        sys.exit(STOPPED)
    return math.inf if code == FAILED else read_run(config.output_dir or "").number("validation_loss")
