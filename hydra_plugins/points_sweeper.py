"""Hydra's sweeper over depthlm's points. Hydra finds its plugins in this folder, and nowhere else."""

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn

from depthlm.config import given_config_dir, sweep_points


class PointsSweeper(BasicSweeper):
    """The points that `sweep_points` makes of a command line, given to any launcher."""

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Launch every point, in order."""
        assert self.config is not None
        assert self.launcher is not None
        points = sweep_points(arguments, given_config_dir(self.config.hydra))
        return self.launcher.launch([point.overrides for point in points], initial_job_idx=0)
