"""A Hydra sweeper over depthlm's points. Hydra searches for plugins only in a folder of this name."""

import math
import sys
from collections.abc import Sequence

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from depthlm.config.hydra_context import config_dir_of, open_names
from depthlm.sweeps import Point, sweep_points


class PointsSweeper(Sweeper):
    """A sweeper that gives the points of `sweep_points` to any launcher."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Create the launcher that the command line selects."""
        self.config_dir = config_dir_of(config.hydra)
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Launch every point in order and print the state of each. Exits with code 1 if a point failed.

        Points that choose a value are launched first, then those that their results call for. A run that diverges
        decides against its value: it neither fails the sweep nor is repeated.
        """
        # imported late: Hydra imports every plugin, even to print help
        from depthlm.config.names import by_name, experiment_of, normal_value
        from depthlm.report.command import show_results
        from depthlm.runs.records import COMPLETE, FAILED, WAITING, read_run
        from depthlm.sweeps.best import find_undecided, is_done
        from depthlm.sweeps.table import print_points

        def diverged(point: Point) -> bool:
            return point.selects and read_run(point.directory).diverged

        assert self.launcher is not None
        launched: list[Point] = []
        done: list[JobReturn] = []
        points = sweep_points(arguments, self.config_dir)
        while new := [point for point in points if point not in launched and not diverged(point)]:
            done += self.launcher.launch([open_names(point.overrides) for point in new], initial_job_idx=len(launched))
            launched += new
            if any(point.best_over for point in points):
                # the results call for further points
                points = sweep_points(arguments, self.config_dir)
        failed = [
            point.directory
            for point, job in zip(launched, done, strict=True)
            if not diverged(point)
            # without a result here, another sweep may have trained it meanwhile
            and (job.status != JobStatus.COMPLETED or (job.return_value == math.inf and not is_done(point)))
        ]
        # points that were refused: their directory contains a complete run with other settings, or nothing
        refused = [directory for directory in failed if read_run(directory).state in (COMPLETE, WAITING)]
        print_points(points, dict.fromkeys(refused, (FAILED, "")))
        experiments = {experiment_of(point.overrides) for point in points}
        is_trained = normal_value("dry_run", by_name(arguments).get("dry_run", "false")) == "false"
        if is_trained and len(points) > 1 and experiments == {experiment_of(arguments)}:
            show_results(arguments, self.config_dir)
        if failed or any(not group.waits for group in find_undecided(points)):
            sys.exit(1)
        return done
