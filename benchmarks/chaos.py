"""Disturb runs at random moments, start them again each time, and compare them with undisturbed ones.

    python benchmarks/chaos.py                       # all arms, two hours on two cores
    python benchmarks/chaos.py --arms torchrun disk  # these, of the list that --help prints
    python benchmarks/chaos.py --events 5            # of each arm

Each arm is a run of size micro on the CPU that is disturbed until it reaches its end; then another one begins, until
there were enough events. Loss curve, validation loss and weights must be equal, bit for bit, to those of a run that one
command trained from start to end. The arm `srun` needs SLURM, the arm `disk` root. Results of arms that do not run stay
in the JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from disturbances.jobs import Begin, finish, starter
from disturbances.kills import MOMENTS, Killer
from disturbances.mishaps import Mishaps, small_disk
from disturbances.results import outcome, same
from interleaved import result_path, write_json
from rich.progress import Progress

RUN = ["size=micro", "data=stdlib", "data.tokenizer=bytes", "data.max_tokens=200K", "tracker=none", "precision=fp32",
       "device=cpu", "training.sequence_length=64", "training.batch_size=4", "training.log_every=1",
       "training.checkpoint_every=7", "training.validate_every=10", "training.validation_tokens=2K",
       "training.sample=null", "training.num_threads=1", "training.rank_timeout=5",
       "training.async_checkpoint=true"]  # fmt: skip
STEPS = 600


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


def main() -> None:
    """Run the arms, print their results and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--events", type=int, help="at most so many events of each arm")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    equal = True
    with Progress() as progress:
        for name in arguments.arms:
            result = run_arm(name, arguments.events, arguments.seed, progress)
            progress.print(json.dumps({name: {key: value for key, value in result.items() if key != "each"}}, indent=2))
            path = result_path("chaos")
            before = json.loads(path.read_text()).get("arms", {}) if path.exists() else {}
            write_json(path, {"arms": {**before, name: result}})
            equal = equal and result["same_bit_for_bit"]
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
