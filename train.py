"""The main job: `python train.py [key=value ...]` trains; the same command again goes on, or says that it is complete.

`python train.py --help` lists what can be composed; `-m` trains each point of a sweep.
"""

import sys
import traceback

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from depthlm.config import finish
from depthlm.config.command_line import exit_on_mistake, prepare_arguments
from depthlm.errors import UserError
from depthlm.training import FAILED, STOPPED, train

MISTAKE = 2
exit_codes: list[int] = []


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(raw: DictConfig) -> None:
    """Train one point."""
    application = HydraConfig.get()
    overrides = list(application.overrides.task)
    if application.mode == RunMode.RUN:
        exit_on_mistake("train.py", lambda: sys.exit(train(finish(raw, overrides))))
    exit_codes.append(point_of_sweep(raw, overrides))
    if exit_codes[-1] == STOPPED:
        sys.exit(STOPPED)


def point_of_sweep(raw: DictConfig, overrides: list[str]) -> int:
    """Train one point; whatever goes wrong in it is told and does not stop the others. Returns its exit code."""
    try:
        return train(finish(raw, overrides))
    except UserError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return MISTAKE
    except Exception:
        traceback.print_exc()
        return FAILED


if __name__ == "__main__":
    try:
        sys.argv[1:] = prepare_arguments(sys.argv[1:])
        main()
    except KeyboardInterrupt:
        print("train.py: interrupted outside of training; the same command goes on from the last checkpoint")
        sys.exit(FAILED)
    sys.exit(max(exit_codes, default=0))
