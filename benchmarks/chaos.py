"""Disturb runs at random moments, start them again each time, and compare them with undisturbed ones.

    python benchmarks/chaos.py                       # all arms, two hours on two cores
    python benchmarks/chaos.py --arms torchrun disk  # these, of the list that --help prints
    python benchmarks/chaos.py --events 5            # of each arm

Each arm is a run of size micro on the CPU that is disturbed until it reaches its end; then another one begins, until
there were enough events. Loss curve, validation loss and weights must be equal, bit for bit, to those of a run that one
command trained from start to end. The arm `srun` needs SLURM, the arm `disk` root. Results of arms that do not run stay
in the JSON.
"""

import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.progress import Progress

from benchmarks.disturbances.kills import MOMENTS, Killer
from benchmarks.disturbances.runs import Begin, Job, finish, newest_step, outcome, same, send, starter
from benchmarks.shared.reporting import Results, arguments_of, headed, parser_of, result_path, table, write_json

RUN = ["size=micro", "data=stdlib", "data.tokenizer=bytes", "data.max_tokens=200K", "tracker=none", "precision=fp32",
       "device=cpu", "training.sequence_length=64", "training.batch_size=4", "training.log_every=1",
       "training.checkpoint_every=7", "training.validate_every=10", "training.validation_tokens=2K",
       "training.sample=null", "training.num_threads=1", "training.rank_timeout=5",
       "training.async_checkpoint=true"]  # fmt: skip
STEPS = 600
# the longest wait for the next step, and the size of the small disk
STEP_SECONDS = 120.0
DISK_MIB = 48


@dataclass(frozen=True)
class Arm:
    """What happens to which run.

    event: kill, stop, disk or tracker. segments: the run goes to each of these steps on so many ranks, in this order.
    moments: when it is killed. most: kills in one segment.
    """

    event: str
    launcher: str
    overrides: list[str]
    events: int
    segments: Sequence[tuple[int, int]] = ((STEPS, 2),)
    moments: Sequence[str] = MOMENTS
    most: int = sys.maxsize


ARMS = {
    "plain": Arm("kill", "python", ["model=attention_residuals"], 200, [(STEPS, 1)]),
    "torchrun": Arm("kill", "torchrun", ["model=mhc", "deepspeed=zero1"], 120),
    "srun": Arm("kill", "srun", ["model=moda", "deepspeed=zero2"], 120),
    "ranks": Arm("kill", "python", ["model=depth_attention", "deepspeed=zero1"], 60,
                 [(step, 2 - step // 60 % 2) for step in range(60, STEPS + 1, 60)],
                 ("resuming", "training"), 4),
    "stop": Arm("stop", "python", ["model=denseformer", "deepspeed=zero1"], 50),
    "disk": Arm("disk", "python", ["model=depth_attention", "deepspeed=zero1"], 20),
    "tracker": Arm("tracker", "python", ["tracker=wandb", "tracker.mode=offline"], 20, [(STEPS, 1)]),
}  # fmt: skip


class Mishaps:
    """Starts a run and disturbs it. events: a record of each mishap so far."""

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


def train(arm: Arm, folder: Path, shared: list[str]) -> dict[str, Any]:
    """Train the run of an arm without disturbances, and return its results."""
    directory = folder / "undisturbed"
    for step, ranks in arm.segments:
        overrides = [*shared, "tracker=none", f"output_dir={directory}", f"training.stop_after={step}"]
        finish(overrides, starter("python", ranks, folder / "output.txt"))
    return outcome(directory)


def disturb(arm: Arm, folder: Path, shared: list[str], seed: int, left: int, on_event: Callable[[], None]) -> list[Any]:
    """Train the run of an arm to its end with at most so many events. Returns them."""
    directory = folder / "disturbed"
    killer, mishaps = Killer(directory, arm.moments, seed), Mishaps(directory, seed)
    events: list[Any] = killer.kills if arm.event == "kill" else mishaps.events
    for step, ranks in arm.segments:
        begin = starter(arm.launcher, ranks, folder / "output.txt")
        overrides = [*shared, f"output_dir={directory}", f"training.stop_after={step}"]
        if arm.event == "kill":
            ended = killer.disturb(overrides, begin, min(arm.most, left - len(events)), on_event)
        else:
            ended = happen(mishaps, arm.event, overrides, begin, left, on_event)
        if not ended:
            finish(overrides, begin)
    return events


def happen(
    mishaps: Mishaps, event: str, overrides: list[str], begin: Begin, left: int, on_event: Callable[[], None]
) -> bool:
    """Let a mishap happen to a run until there were enough. Returns whether the run has reached its end."""
    life = {"stop": mishaps.stop, "disk": mishaps.fill_disk, "tracker": mishaps.kill_tracker}[event]
    while len(mishaps.events) < left:
        before = len(mishaps.events)
        if life(overrides, begin):
            return True
        for _ in range(len(mishaps.events) - before):
            on_event()
    return False


def run_arm(name: str, most: int | None, seed: int, progress: Progress) -> dict[str, Any]:
    """Run an arm and return its results."""
    arm, started = ARMS[name], time.monotonic()
    events: list[Any] = []
    runs, equal = 0, True
    wanted = min(arm.events, most or arm.events)
    bar = progress.add_task(name, total=wanted)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shared = [*RUN, *arm.overrides, f"training.max_steps={STEPS}", f"data.path={folder}/tokens"]
        undisturbed = train(arm, folder, shared)
        while len(events) < wanted:
            place = folder / f"run-{runs}"
            place.mkdir()
            with small_disk(place) if arm.event == "disk" else nullcontext():
                left = wanted - len(events)
                seen = disturb(arm, place, shared, seed + runs, left, lambda: progress.advance(bar))
                runs += 1
                equal = same(outcome(place / "disturbed"), undisturbed) and equal
            if not seen:
                raise RuntimeError(f"{name}: a run of {STEPS} steps ended before anything happened to it")
            events += seen
    each = [asdict(event) if arm.event == "kill" else event for event in events]
    return {
        "launcher": arm.launcher,
        "overrides": arm.overrides,
        "events": len(each),
        "runs": runs,
        "steps": STEPS,
        **(kill_statistics(each) if arm.event == "kill" else {}),
        "same_bit_for_bit": equal,
        "minutes": (time.monotonic() - started) / 60,
        "each": each,
    }


def kill_statistics(each: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the runs did when they were killed, and how long the surviving ranks took to end."""
    alone = [kill["seconds_to_end"] for kill in each if kill["seconds_to_end"] is not None]
    seconds = {"median": statistics.median(alone), "largest": max(alone)} if alone else None
    return {
        "states": Counter(kill["state"] for kill in each),
        "of_one_rank_alone": len(alone),
        "seconds_until_the_others_ended": seconds,
    }


def markdown(results: Results) -> str:
    lines = (
        (name, arm["launcher"], " ".join(arm["overrides"]), str(arm["events"]), str(arm["same_bit_for_bit"]))
        for name, arm in results["arms"].items()
    )
    return headed(results, table(("arm", "launcher", "run", "events", "same bit for bit"), lines))


def main() -> int:
    """Run the arms, print their results and write them."""
    parser = parser_of(__doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--events", type=int, help="at most so many events of each arm")
    parser.add_argument("--seed", type=int, default=1)
    arguments = arguments_of(parser, markdown)
    path, ran = arguments.output or result_path("chaos"), {}
    with Progress() as progress:
        for name in arguments.arms:
            ran[name] = run_arm(name, arguments.events, arguments.seed, progress)
            before = json.loads(path.read_text()).get("arms", {}) if path.exists() else {}
            results = write_json(path, {"arms": {**before, name: ran[name]}})
    print(markdown(results))
    return int(not all(result["same_bit_for_bit"] for result in ran.values()))


if __name__ == "__main__":
    sys.exit(main())
