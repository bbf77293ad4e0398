"""The main job: `python train.py [key=value ...]` trains; the same command again goes on, or says that it is complete.

`python train.py --help` lists what can be composed; `-m` trains each point of a sweep.
"""

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from depthlm.config import finish
from depthlm.config.command_line import fail, prepare_arguments
from depthlm.errors import UserError
from depthlm.training import STOPPED, train

exit_codes: list[int] = []


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(raw: DictConfig) -> None:
    """Train one point; a sweep goes on after a point that failed, and ends with the worst exit code."""
    application = HydraConfig.get()
    alone = application.mode == RunMode.RUN
    try:
        code = train(finish(raw, list(application.overrides.task)))
    except UserError as error:
        if alone:
            fail(error)
        print(error, file=sys.stderr)
        code = 2
    exit_codes.append(code)
    if alone or code == STOPPED:
        sys.exit(code)


if __name__ == "__main__":
    sys.argv[1:] = prepare_arguments(sys.argv[1:])
    main()
    sys.exit(max(exit_codes, default=0))
