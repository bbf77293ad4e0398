"""Kill a run at random moments, and start it again each time."""

import itertools
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.disturbances.runs import Begin, Job, is_saving, newest_step, send

MOMENTS = ("training", "saving", "resuming")
# printed once the ranks have met; until then, a rank waits for missing ranks for ten minutes
MET = "run directory"


@dataclass(frozen=True)
class Kill:
    """A kill.

    moment: what the run was meant to do. state: what it did: training, saving, or resuming, which is
    everything before the first new step. ranks: how many were killed, of how many. seconds_to_end: how long the others
    then took to end, or None if all were killed.
    """

    moment: str
    state: str
    step: int
    ranks: list[int]
    seconds_to_end: float | None


class Killer:
    """Starts and kills one run. moments: the run is killed at these by turns. kills: those so far."""

    def __init__(self, directory: Path, moments: Iterable[str] = MOMENTS, seed: int = 0) -> None:
        self.directory, self.kills = directory, list[Kill]()
        self._moments, self._random = itertools.cycle(moments), random.Random(seed)
        self._start_seconds = 5.0

    def disturb(
        self, overrides: Sequence[str], begin: Begin, most: int, on_kill: Callable[[], None] = lambda: None
    ) -> bool:
        """Start and kill the run at most this many times. Returns whether it has reached its end."""
        for _ in range(most):
            if not self._life(overrides, begin):
                return True
            on_kill()
        return False

    def _life(self, overrides: Sequence[str], begin: Begin) -> bool:
        """Start the run and kill it. Returns False if it reached its end; raises RuntimeError if it failed."""
        moment, before, born = next(self._moments), newest_step(self.directory), time.time()
        job = begin(overrides)
        try:
            self._wait(job, moment, before, born)
            kill = self._kill(job, moment, before, born)
            if kill is not None:
                self.kills.append(kill)
            return kill is not None
        finally:
            job.kill()

    def _wait(self, job: Job, moment: str, before: int, born: float) -> None:
        """Wait for the moment, or for the end of the job."""
        draw, started = self._random.uniform, time.monotonic()

        def until(reached: Callable[[], bool]) -> None:
            while not job.failed() and job.code() is None and not reached():
                time.sleep(0.002)

        def passed(seconds: float) -> Callable[[], bool]:
            end = time.monotonic() + seconds
            return lambda: time.monotonic() > end

        def trains() -> bool:
            return newest_step(self.directory) > before

        if moment == "resuming":
            return until(passed(draw(0, self._start_seconds)))
        until(trains)
        self._start_seconds = time.monotonic() - started
        until(passed(draw(0, 0.5)))
        if moment == "saving":
            too_late = passed(2.0)
            until(lambda: is_saving(self.directory, born) or too_late())
            until(passed(draw(0, 0.01)))
        return None

    def _kill(self, job: Job, moment: str, before: int, born: float) -> Kill | None:
        ranks = job.ranks()
        if job.failed():
            raise RuntimeError(job.text())
        alone = len(ranks) > 1 and MET in job.text() and self._random.random() < 0.5
        victims = [self._random.choice(ranks)] if alone else ranks
        if len(victims) == len(ranks):
            # a node that dies takes the launcher with it
            job.kill()
        for victim in victims:
            send(victim, signal.SIGKILL)
        killed = time.monotonic()
        step = newest_step(self.directory)
        state = "training" if step > before else "resuming"
        if is_saving(self.directory, born):
            state = "saving"
        if job.wait() == 0:
            return None
        seconds = time.monotonic() - killed if len(victims) < len(ranks) else None
        return Kill(moment, state, step, [len(victims), len(ranks)], seconds)
