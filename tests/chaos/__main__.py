"""Disturb runs at random moments, start them again each time, and compare them with undisturbed ones.

    python -m tests.chaos                       # all arms, two hours on two cores
    python -m tests.chaos --arms torchrun disk  # these, of the list that --help prints
    python -m tests.chaos --events 5            # of each arm

Each arm is a run of size micro on the CPU that is disturbed until it reaches its end; then another one begins, until
there were enough events. Loss curve, validation loss and weights must be equal, bit for bit, to those of a run that one
command trained from start to end. The arm `srun` needs SLURM, the arm `disk` root. Results of arms that do not run stay
in the JSON.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.shared.reporting import Results, arguments_of, headed, parser_of, result_path, table, write_json

from .disturbers import DiskFiller, Disturber, Killer, Stopper
from .runs import finish, outcome, same, starter

RUN = ["size=micro", "data=stdlib", "data.tokenizer=bytes", "data.max_tokens=200K", "tracker=none", "precision=fp32",
       "device=cpu", "training.sequence_length=64", "training.batch_size=4", "training.log_every=1",
       "training.checkpoint_every=7", "training.validate_every=10", "training.validation_tokens=2K",
       "training.sample=null", "training.num_threads=1", "training.rank_timeout=5",
       "training.async_checkpoint=true"]  # fmt: skip
STEPS = 600
DISK_MIB = 48


@dataclass(frozen=True)
class Arm:
    """What happens to which run.

    segments: pairs (step, ranks): the run trains to each step on that many ranks. most: events in one segment.
    """

    disturber: Callable[[Path, int], Disturber]
    launcher: str
    overrides: list[str]
    events: int
    segments: Sequence[tuple[int, int]] = ((STEPS, 2),)
    most: int = sys.maxsize


ARMS = {
    "plain": Arm(Killer, "python", ["model=attention_residuals"], 200, [(STEPS, 1)]),
    "torchrun": Arm(Killer, "torchrun", ["model=mhc", "deepspeed=zero1"], 120),
    "srun": Arm(Killer, "srun", ["model=moda", "deepspeed=zero2"], 120),
    "ranks": Arm(partial(Killer, moments=("resuming", "training")), "python",
                 ["model=depth_attention", "deepspeed=zero1"], 60,
                 [(step, 2 - step // 60 % 2) for step in range(60, STEPS + 1, 60)], 4),
    "stop": Arm(Stopper, "python", ["model=denseformer", "deepspeed=zero1"], 50),
    "disk": Arm(DiskFiller, "python", ["model=depth_attention", "deepspeed=zero1"], 20),
}  # fmt: skip


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small file system at this folder; needs root. Raises CalledProcessError if it cannot be mounted."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}M", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def train(arm: Arm, folder: Path, shared: list[str]) -> dict[str, Any]:
    """Train the run of an arm without disturbances, and return its results."""
    directory = folder / "undisturbed"
    for step, ranks in arm.segments:
        overrides = [*shared, "tracker=none", f"output_dir={directory}", f"training.stop_after={step}"]
        finish(overrides, starter("python", ranks, folder / "output.txt"))
    return outcome(directory)


def disturb(arm: Arm, folder: Path, shared: list[str], seed: int, left: int) -> list[Any]:
    """Train the run of an arm to its end with at most `left` events, and return them."""
    directory = folder / "disturbed"
    disturber = arm.disturber(directory, seed)
    for step, ranks in arm.segments:
        begin = starter(arm.launcher, ranks, folder / "output.txt")
        overrides = [*shared, f"output_dir={directory}", f"training.stop_after={step}"]
        if not disturber.disturb(overrides, begin, min(arm.most, left - len(disturber.events))):
            finish(overrides, begin)
    return disturber.events


def run_arm(name: str, most: int | None, seed: int) -> dict[str, Any]:
    """Run an arm and return its results."""
    arm, started = ARMS[name], time.monotonic()
    events: list[dict[str, Any]] = []
    runs, equal = 0, True
    wanted = min(arm.events, most or arm.events)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shared = [*RUN, *arm.overrides, f"training.max_steps={STEPS}", f"data.path={folder}/tokens"]
        undisturbed = train(arm, folder, shared)
        while len(events) < wanted:
            place = folder / f"run-{runs}"
            place.mkdir()
            with small_disk(place) if arm.disturber is DiskFiller else nullcontext():
                seen = disturb(arm, place, shared, seed + runs, wanted - len(events))
                runs += 1
                equal = same(outcome(place / "disturbed"), undisturbed) and equal
            if not seen:
                raise RuntimeError(f"{name}: a run of {STEPS} steps ended before anything happened to it")
            events += seen
    return {
        "launcher": arm.launcher,
        "overrides": arm.overrides,
        "events": len(events),
        "runs": runs,
        "steps": STEPS,
        **(kill_statistics(events) if "state" in events[0] else {}),
        "same_bit_for_bit": equal,
        "minutes": (time.monotonic() - started) / 60,
        "each": events,
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
    for name in arguments.arms:
        ran[name] = run_arm(name, arguments.events, arguments.seed)
        before = json.loads(path.read_text()).get("arms", {}) if path.exists() else {}
        results = write_json(path, {"arms": {**before, name: ran[name]}})
        print(f"{name}: {ran[name]['events']} events in {ran[name]['minutes']:.0f} minutes", flush=True)
    print(markdown(results))
    return int(not all(result["same_bit_for_bit"] for result in ran.values()))


if __name__ == "__main__":
    sys.exit(main())
