"""The main job: `python train.py [key=value ...]` trains; the same command again goes on, or says that it is complete.

`python train.py --help` lists what can be composed; `-m` trains each point of an experiment, or of a sweep.
"""

from depthlm.interrupts import quiet_interrupts

if __name__ == "__main__":
    # the imports below take seconds
    quiet_interrupts("train.py", "outside of training nothing is lost, and the same command starts again")

import math
import sys
import traceback

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from depthlm.analysis.runs import read_run
from depthlm.config import finish
from depthlm.config.command_line import exit_on_mistake, prepare_arguments
from depthlm.errors import UserError
from depthlm.training import FAILED, STOPPED, hand_back, train


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(raw: DictConfig) -> float | None:
    """Train one point. Of a sweep, returns its validation loss: infinity where it failed."""
    application = HydraConfig.get()
    overrides = list(application.overrides.task)
    if application.mode == RunMode.RUN:
        exit_on_mistake("train.py", lambda: sys.exit(train(finish(raw, overrides))))
    return point_of_sweep(raw, overrides)


def point_of_sweep(raw: DictConfig, overrides: list[str]) -> float | None:
    """Train one point; whatever goes wrong in it is told and does not stop the others."""
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


if __name__ == "__main__":
    sys.argv[1:] = prepare_arguments(sys.argv[1:])
    main()
