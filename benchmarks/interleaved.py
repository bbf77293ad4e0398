"""Fair comparison in one process: every contender takes its turn in every round, on the same machine state."""

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from depthlm import environment

Step = Callable[[], object]


def measure(contenders: dict[str, Step], rounds: int, steps: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of one step of each contender in each round; the order of a round alternates."""
    for step in contenders.values():
        for _ in range(warmup):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        order = list(contenders.items())
        for name, step in order if number % 2 == 0 else reversed(order):
            _synchronize()
            started = time.perf_counter()
            for _ in range(steps):
                step()
            _synchronize()
            seconds[name].append((time.perf_counter() - started) / steps)
    return seconds


def ratio(seconds: dict[str, list[float]], ours: str, theirs: str) -> float:
    """How many times faster `ours` is: the median over rounds of the ratio within a round."""
    return statistics.median(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True))


def spread(seconds: dict[str, list[float]], one: str, twin: str) -> float:
    """Largest deviation from 1 of the ratio of two runs of the same code: what this machine cannot resolve."""
    return max(abs(b / a - 1) for a, b in zip(seconds[one], seconds[twin], strict=True))


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Write results with the machine they were measured on."""
    machine = environment.describe(environment.ranks())
    machine.pop("command")
    machine["threads"] = torch.get_num_threads()
    machine["load_average"] = os.getloadavg()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, **results}, indent=1) + "\n")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
