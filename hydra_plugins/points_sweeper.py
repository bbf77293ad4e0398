"""Hydra's sweeper over depthlm's points. Hydra finds its plugins in this folder, and nowhere else."""

import math
import sys
from collections.abc import Sequence

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from depthlm.config import given_config_dir
from depthlm.sweeps import sweep_points


class PointsSweeper(Sweeper):
    """The points that `sweep_points` makes of a command line, given to any launcher."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take the launcher that the command line chose."""
        self.config_dir = given_config_dir(config.hydra)
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Launch every point, in order, and show what became of each; exits with 1 where one failed."""
        # Hydra imports every plugin, also for help
        from depthlm.runs.records import COMPLETE, FAILED, WAITING, read_run
        from depthlm.sweeps.table import print_points

        assert self.launcher is not None
        points = sweep_points(arguments, self.config_dir)
        done = self.launcher.launch([point.overrides for point in points], initial_job_idx=0)
        failed = [
            point.directory
            for point, job in zip(points, done, strict=True)
            if job.status != JobStatus.COMPLETED or job.return_value == math.inf
        ]
        # refused: a complete run of other settings lies there, or nothing
        refused = [directory for directory in failed if read_run(directory).state in (COMPLETE, WAITING)]
        print_points(points, dict.fromkeys(refused, FAILED))
        if failed:
            sys.exit(1)
        return done
