"""Kill a run at random moments, restart it each time, and compare it with an undisturbed run.

    python benchmarks/chaos.py --kills 50

Two gloo ranks on the CPU. A kill is a SIGKILL to one or both of them, at any time after the first new step, and every
second time while a checkpoint is being written. The loss curve, the validation loss and the final weights must be
equal, bit for bit.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file

REPOSITORY = Path(__file__).resolve().parent.parent
WORLD_SIZE = 2
RUN = ["size=micro", "data=stdlib", "data.tokenizer=bytes", "data.max_tokens=200K", "tracker=none", "precision=fp32",
       "device=cpu", "deepspeed=zero1", "training.sequence_length=64", "training.batch_size=4", "training.log_every=1",
       "training.checkpoint_every=3", "training.validate_every=10", "training.validation_tokens=2K",
       "training.sample=null", "training.num_threads=1", "training.rank_timeout=5"]  # fmt: skip


# starts both ranks of a run
Start = Callable[[Sequence[str]], Sequence[Any]]


@dataclass(frozen=True)
class Kill:
    """A kill: its ranks and time, and how long the surviving rank took to end (None: no rank survived)."""

    victims: list[int]
    step: int
    saving: bool
    seconds_to_end: float | None


def start(overrides: Sequence[str]) -> list[subprocess.Popen[str]]:
    """Start both ranks of a run, with the environment variables of a launcher."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    shared = {"WORLD_SIZE": str(WORLD_SIZE), "LOCAL_WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": port}  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, "train.py", *overrides],
            cwd=REPOSITORY,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]


def finish(overrides: Sequence[str], begin: Start = start) -> None:
    """Train a run to its end. Raises RuntimeError with the output of its ranks if it fails."""
    ranks = begin(overrides)
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("\n".join(outputs))


def life(
    overrides: Sequence[str], directory: Path, chance: random.Random, while_saving: bool, begin: Start
) -> Kill | None:
    """Start a run and kill it; None if it was complete before. Raises RuntimeError if it did not resume."""
    before, ranks = newest_step(directory), begin(overrides)
    try:
        while newest_step(directory) <= before:
            if any(rank.poll() for rank in ranks):
                raise RuntimeError("\n".join(rank.communicate()[0] for rank in ranks))
            if all(rank.poll() == 0 for rank in ranks):
                return None
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 1.0))
        saving = False
        deadline = time.monotonic() + 2
        while while_saving and not saving and time.monotonic() < deadline:
            saving = is_saving(directory)
        time.sleep(chance.uniform(0, 0.01))
        victims = chance.choice([[0, 1], [0, 1], [0], [1]])
        for victim in victims:
            ranks[victim].send_signal(signal.SIGKILL)
        saving, killed_at = is_saving(directory), time.monotonic()
        if all(rank.wait(timeout=60) == 0 for rank in ranks):
            return None
        alone = len(victims) < WORLD_SIZE
        return Kill(victims, newest_step(directory), saving, time.monotonic() - killed_at if alone else None)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def disturb(overrides: Sequence[str], directory: Path, kills: int, seed: int, begin: Start = start) -> list[Kill]:
    """Start and kill a run this many times."""
    chance, done = random.Random(seed), []
    for number in track(range(kills), "killing"):
        kill = life(overrides, directory, chance, number % 2 == 1, begin)
        if kill is None:
            break
        done.append(kill)
    return done


def newest_step(directory: Path) -> int:
    """Return the newest step in metrics.jsonl, or 0 if there is none."""
    try:
        rows = (directory / "metrics.jsonl").read_text().splitlines()
        return max((json.loads(row)["step"] for row in rows[-2:]), default=0)
    except (OSError, ValueError):
        return 0


def is_saving(directory: Path) -> bool:
    """Return whether a checkpoint is being written."""
    return any((directory / "checkpoints").glob(".saving-*"))


def outcome(directory: Path) -> dict[str, Any]:
    """Return the results that must not depend on kills: the loss curve, the validation loss and the weights."""
    rows = [json.loads(row) for row in (directory / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "tokens", "loss", "learning_rate", "grad_norm", "validation/stdlib/loss", "validation/local/loss")
    summary = json.loads((directory / "summary.json").read_text())
    newest = (directory / "checkpoints/latest").read_text().strip()
    return {
        "curve": [[row.get(name) for name in names] for row in rows],
        "validation_loss": summary["validation_loss"],
        "weights": load_file(directory / "checkpoints" / newest / "model.safetensors"),
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two results are equal, bit for bit."""
    weights = one["weights"].keys() == other["weights"].keys() and all(
        torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"]
    )
    return weights and one["curve"] == other["curve"] and one["validation_loss"] == other["validation_loss"]


def main() -> None:
    """Run the comparison, print it and write the results."""
    from interleaved import result_path, write_json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = [*RUN, f"training.max_steps={60 * arguments.kills}", f"data.path={folder}/tokens"]
        finish([*run, f"output_dir={folder}/undisturbed"])
        overrides = [*run, f"output_dir={folder}/killed"]
        started = time.monotonic()
        kills = disturb(overrides, Path(folder, "killed"), arguments.kills, arguments.seed)
        finish(overrides)
        killed, undisturbed = outcome(Path(folder, "killed")), outcome(Path(folder, "undisturbed"))
        log = Path(folder, "killed/train.log").read_text()
    alone = [kill.seconds_to_end for kill in kills if kill.seconds_to_end is not None]
    results = {
        "kills": len(kills),
        "while_saving": sum(kill.saving for kill in kills),
        "of_one_rank_alone": len(alone),
        "seconds_until_the_other_ended": {"median": sorted(alone)[len(alone) // 2], "largest": max(alone)},
        "resumed": log.count("resumed from"),
        "steps": len(undisturbed["curve"]),
        "minutes": (time.monotonic() - started) / 60,
        "validation_loss": {"killed": killed["validation_loss"], "undisturbed": undisturbed["validation_loss"]},
        "same_bit_for_bit": same(killed, undisturbed),
    }
    for name, value in results.items():
        print(f"{name}: {value}")
    write_json(result_path("chaos"), {**results, "each": [asdict(kill) for kill in kills]})
    sys.exit(0 if results["same_bit_for_bit"] else 1)


if __name__ == "__main__":
    main()
