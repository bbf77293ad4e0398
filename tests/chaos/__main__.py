"""Disturb runs at random moments, start them again each time, and compare them with undisturbed ones.

    python -m tests.chaos                       # all arms, two hours on two cores
    python -m tests.chaos --arms torchrun stop  # these, of the list that --help prints
    python -m tests.chaos --events 5            # of each arm

Each arm is a run of size micro on the CPU that is disturbed until it reaches its end; then another one begins, until
there were enough events. Loss curve, validation loss and weights must be equal, bit for bit, to those of a run that one
command trained from start to end. The arm `srun` needs SLURM.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .disturbers import Disturber, Killer, Stopper
from .runs import finish, outcome, same, starter

RUN = ["size=micro", "data=stdlib", "data.tokenizer=bytes", "data.max_tokens=200K", "tracker=none", "precision=fp32",
       "device=cpu", "training.sequence_length=64", "training.batch_size=4", "training.log_every=1",
       "training.checkpoint_every=7", "training.validate_every=10", "training.validation_tokens=2K",
       "training.sample=null", "training.num_threads=1", "training.rank_timeout=5",
       "training.async_checkpoint=true"]  # fmt: skip
STEPS = 600


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
}  # fmt: skip


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


def run_arm(name: str, most: int | None, seed: int) -> bool:
    """Run an arm, and print its results. Return whether they are the same as without disturbances."""
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
            seen = disturb(arm, place, shared, seed + runs, wanted - len(events))
            runs += 1
            equal = same(outcome(place / "disturbed"), undisturbed) and equal
            if not seen:
                raise RuntimeError(f"{name}: a run of {STEPS} steps ended before anything happened to it")
            events += seen
    minutes, text = (time.monotonic() - started) / 60, "the same bit for bit" if equal else "NOT THE SAME"
    print(f"{name}: {len(events)} events in {runs} runs and {minutes:.0f} minutes: {text}", flush=True)
    if "state" in events[0]:
        # seconds that surviving ranks took to end
        seconds = [kill["seconds_to_end"] for kill in events if kill["seconds_to_end"] is not None] or [0]
        print(f"  killed while {dict(Counter(kill['state'] for kill in events))}; the others ended within "
              f"{statistics.median(seconds):.1f} s (median), {max(seconds):.1f} s at most", flush=True)  # fmt: skip
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--events", type=int, help="at most so many events of each arm")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    same_results = [run_arm(name, arguments.events, arguments.seed) for name in arguments.arms]
    return int(not all(same_results))


if __name__ == "__main__":
    sys.exit(main())
