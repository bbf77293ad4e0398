"""Hydra's sweeper over depthlm's points. Hydra finds its plugins in this folder, and nowhere else."""

import math
import sys
from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn, JobStatus

from depthlm.analysis.points import print_points
from depthlm.config import given_config_dir, sweep_points

FAILED = 1


class PointsSweeper(BasicSweeper):
    """The points that `sweep_points` makes of a command line, given to any launcher."""

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Launch every point, in order, and show what became of each; exits with 1 where one failed."""
        assert self.config is not None
        assert self.launcher is not None
        config_dir = given_config_dir(self.config.hydra)
        points = sweep_points(arguments, config_dir)
        done = self.launcher.launch([point.overrides for point in points], initial_job_idx=0)
        print_points(points, config_dir)
        if any(job.status != JobStatus.COMPLETED or job.return_value == math.inf for job in done):
            sys.exit(FAILED)
        return done
