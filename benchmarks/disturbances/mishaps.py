"""Stop a rank, fill the disk, and kill the process of the tracker while a run trains."""

import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from .jobs import Begin, Job, send
from .results import newest_step

STEP_SECONDS = 120.0
DISK_MIB = 48


class Mishaps:
    """Starts one run and lets things happen to it. events: a record of each mishap so far."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        self.directory, self.events = directory, list[dict[str, Any]]()
        self._random = random.Random(seed)

    def stop(self, overrides: Sequence[str], begin: Begin) -> bool:
        """SIGSTOP one rank of two: briefly, so that the run continues, or until the other rank has ended.

        Then SIGCONT it: a run that continues must train, and a rank that is alone must end by itself, having saved
        nothing. Returns whether the run has reached its end.
        """
        job = begin(overrides)
        try:
            if not self._trains(job):
                return True
            for number in range(3):
                time.sleep(self._random.uniform(0, 0.5))
                ranks = job.ranks()
                if len(ranks) < 2:
                    return job.wait() == 0
                stopped, brief = self._random.choice(ranks), number < 2
                send(stopped, signal.SIGSTOP)
                started = time.monotonic()
                if brief:
                    time.sleep(self._random.uniform(0.1, 1.5))
                else:
                    self._wait(lambda s=stopped: set(job.ranks()) <= {s}, "the other rank did not end", job)
                seconds = time.monotonic() - started
                step = newest_step(self.directory)
                send(stopped, signal.SIGCONT)
                self.events.append({"step": step, "brief": brief, "seconds": seconds})
                if not brief:
                    if job.wait() == 0 or newest_step(self.directory) > step:
                        raise RuntimeError(f"the rank that had been stopped continued:\n{job.text()}")
                elif not self._trains(job):
                    return True
            return False
        finally:
            job.kill()

    def fill_disk(self, overrides: Sequence[str], begin: Begin) -> bool:
        """Fill the disk of the run directory for a moment; every second time, kill the run and start it meanwhile.

        Returns whether the run has reached its end.
        """
        job, filler = begin(overrides), self.directory.parent / "filler"
        try:
            while self._trains(job):
                time.sleep(self._random.uniform(0, 0.5))
                step, restart = newest_step(self.directory), len(self.events) % 2 == 1
                _fill(filler)
                time.sleep(self._random.uniform(0.2, 2.0))
                if restart:
                    job.kill()
                    job.wait()
                    job = begin(overrides)
                    time.sleep(self._random.uniform(0, 10.0))
                self.events.append({"step": step, "until": newest_step(self.directory), "restarted": restart})
                filler.unlink()
                if restart:
                    # a run that begins on a full disk may fail
                    self.events[-1]["failed"] = job.failed()
                    return job.code() == 0
            return True
        finally:
            job.kill()
            filler.unlink(missing_ok=True)

    def kill_tracker(self, overrides: Sequence[str], begin: Begin) -> bool:
        """Kill the process of W&B; the run must still train. Then stop it. Returns whether it has reached its end."""
        job = begin(overrides)
        try:
            if not self._trains(job):
                return True
            time.sleep(self._random.uniform(0, 1.0))
            services = [pid for rank in job.ranks() for pid in _services(rank)]
            step = newest_step(self.directory)
            for pid in services:
                send(pid, signal.SIGKILL)
            if not services and job.code() is None:
                raise RuntimeError(f"W&B has no process:\n{job.text()}")
            if not self._trains(job):
                return True
            self.events.append({"step": step, "processes": len(services)})
            for pid in job.ranks():
                send(pid, signal.SIGTERM)
            started, code = time.monotonic(), job.wait()
            self.events[-1] |= {"code": code, "seconds_to_end": time.monotonic() - started}
            if code not in (0, 75):
                raise RuntimeError(job.text())
            return code == 0
        finally:
            job.kill()

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


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small file system at this folder; needs root. Raises CalledProcessError if it cannot be mounted."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}M", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def _fill(file: Path) -> None:
    with suppress(OSError), file.open("wb", buffering=0) as stream:
        while stream.write(b"\0" * 4096):
            pass


def _services(rank: int) -> list[int]:
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(rank).children(recursive=True) if "wandb" in child.name()]
    return []
