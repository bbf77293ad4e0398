"""A launcher of sweeps whose runs have known results."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus

from depthlm.config import compose
from depthlm.config.names import by_name
from depthlm.runs.records import read_run

from ..report.made_up import write_run


class Launcher:
    """Writes runs whose loss is a function of the learning rate, or the text of a failure.

    launched: the overrides of the runs, by round. limit: the runs after which it is killed.
    """

    def __init__(self, outcome: Callable[[float], float | str], limit: int = 100) -> None:
        self.outcome, self.limit = outcome, limit
        self.launched: list[list[Mapping[str, str]]] = []

    @property
    def rates(self) -> list[float]:
        return [float(given["optimizer.lr"]) for of_round in self.launched for given in of_round]

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        self.launched.append([])
        return [self.train(overrides) for overrides in job_overrides]

    def train(self, overrides: Sequence[str]) -> JobReturn:
        given = by_name(overrides)
        self.launched[-1].append(given)
        if len(self.rates) > self.limit:
            raise KeyboardInterrupt
        outcome = self.outcome(self.rates[-1])
        failure = outcome if isinstance(outcome, str) else None
        folder = Path(compose(overrides, here=False).output_dir or "")
        if "dry_run" not in given and read_run(folder).state != "complete":
            write_run(folder, 3.0 if isinstance(outcome, str) else outcome, failure=failure)
        return JobReturn(status=JobStatus.COMPLETED, _return_value=math.inf if failure else outcome)
