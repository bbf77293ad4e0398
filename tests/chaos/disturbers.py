"""What happens to a run at random moments: kills and stopped ranks."""

import itertools
import random
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .runs import Begin, Job, is_saving, newest_step, send

MOMENTS = ("training", "saving", "resuming")
# printed once the ranks have met; until then, a rank waits for missing ranks for ten minutes
MET = "run directory"
# the longest wait for the next step
STEP_SECONDS = 120.0


class Disturber(ABC):
    """Starts a run and disturbs it. events: a record of each disturbance so far."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        self.directory, self.events = directory, list[dict[str, Any]]()
        self._random = random.Random(seed)

    def disturb(self, overrides: Sequence[str], begin: Begin, most: int) -> bool:
        """Start and disturb the run until this many events were added. Returns whether it has reached its end."""
        wanted, ended = len(self.events) + most, False
        while not ended and len(self.events) < wanted:
            job = begin(overrides)
            try:
                ended = self.life(job)
            finally:
                job.kill()
        return ended

    @abstractmethod
    def life(self, job: Job) -> bool:
        """Disturb a run that has just started. Returns whether it has reached its end.

        Raises RuntimeError if the run failed by itself.
        """

    def _sleep(self, low: float, high: float) -> None:
        time.sleep(self._random.uniform(low, high))

    def _trains(self, job: Job) -> bool:
        """Wait for a new step. Returns False if the run reached its end; raises RuntimeError if it failed."""
        before = newest_step(self.directory)
        self._wait(lambda: newest_step(self.directory) > before or job.code() is not None, "no new step", job)
        if job.failed():
            raise RuntimeError(job.text())
        return job.code() is None

    def _wait(self, reached: Callable[[], bool], otherwise: str, job: Job) -> None:
        deadline = time.monotonic() + STEP_SECONDS
        while not reached():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{otherwise} within {STEP_SECONDS:.0f} s:\n{job.text()}")
            time.sleep(0.01)


class Killer(Disturber):
    """Kills one rank or all. moments: when to kill a run, in turn.

    An event has the moment; the state, which is what the run did then: training, saving, or resuming, which is
    everything before the first new step; how many ranks were killed, of how many; and how long the others then took to
    end, or None if all were killed.
    """

    def __init__(self, directory: Path, seed: int = 0, moments: Iterable[str] = MOMENTS) -> None:
        super().__init__(directory, seed)
        self._moments, self._start_seconds = itertools.cycle(moments), 5.0

    def life(self, job: Job) -> bool:
        moment, before, born = next(self._moments), newest_step(self.directory), time.time()
        self._wait_for(job, moment, before, born)
        ranks = job.ranks()
        if job.failed():
            raise RuntimeError(job.text())
        alone = len(ranks) > 1 and MET in job.text() and self._random.random() < 0.5
        victims = [self._random.choice(ranks)] if alone else ranks
        if not alone:
            # a node that dies takes the launcher with it
            job.kill()
        for victim in victims:
            send(victim, signal.SIGKILL)
        killed, step = time.monotonic(), newest_step(self.directory)
        state = "saving" if is_saving(self.directory, born) else "training" if step > before else "resuming"
        if job.wait() == 0:
            return True
        seconds = time.monotonic() - killed if alone else None
        ranks_killed = [len(victims), len(ranks)]
        self.events.append(
            {"moment": moment, "state": state, "step": step, "ranks": ranks_killed, "seconds_to_end": seconds}
        )
        return False

    def _wait_for(self, job: Job, moment: str, before: int, born: float) -> None:
        """Wait for the moment, or for the end of the job."""
        draw, started = self._random.uniform, time.monotonic()

        def until(reached: Callable[[], bool]) -> None:
            while not job.failed() and job.code() is None and not reached():
                time.sleep(0.002)

        def passed(seconds: float) -> Callable[[], bool]:
            end = time.monotonic() + seconds
            return lambda: time.monotonic() > end

        if moment == "resuming":
            until(passed(draw(0, self._start_seconds)))
            return
        until(lambda: newest_step(self.directory) > before)
        self._start_seconds = time.monotonic() - started
        until(passed(draw(0, 0.5)))
        if moment == "saving":
            too_late = passed(2.0)
            until(lambda: is_saving(self.directory, born) or too_late())
            until(passed(draw(0, 0.01)))


class Stopper(Disturber):
    """Sends SIGSTOP to one rank of two: twice briefly, so that the run continues, then until the other one has ended.

    Then it sends SIGCONT: a run that continues must train, and a rank that is alone must end by itself, having saved
    nothing.
    """

    def life(self, job: Job) -> bool:
        if not self._trains(job):
            return True
        for brief in (True, True, False):
            self._sleep(0, 0.5)
            ranks = job.ranks()
            if len(ranks) < 2:
                return job.wait() == 0
            stopped = self._random.choice(ranks)
            send(stopped, signal.SIGSTOP)
            started = time.monotonic()
            if brief:
                self._sleep(0.1, 1.5)
            else:
                self._wait(lambda s=stopped: set(job.ranks()) <= {s}, "the other rank did not end", job)
            seconds = time.monotonic() - started
            step = newest_step(self.directory)
            send(stopped, signal.SIGCONT)
            self.events.append({"step": step, "brief": brief, "seconds": seconds})
            if brief and not self._trains(job):
                return True
            if not brief and (job.wait() == 0 or newest_step(self.directory) > step):
                raise RuntimeError(f"the rank that had been stopped continued:\n{job.text()}")
        return False
