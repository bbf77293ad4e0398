"""Fair comparison in one process: every contender takes its turn in every round, on the same machine state."""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from depthlm.distributed.launchers import ranks
from depthlm.machine import environment

Step = Callable[[], object]


def measure(
    contenders: dict[str, Step], rounds: int, steps: int, warmup: int = 2, settle: int = 0
) -> dict[str, list[float]]:
    """Seconds of one step of each contender in each round; the order of a round alternates.

    settle: untimed steps at the beginning of a turn, which take what the contender before has left in caches and heap.
    """
    for step in contenders.values():
        for _ in range(warmup):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        order = list(contenders.items())
        for name, step in order if number % 2 == 0 else reversed(order):
            for _ in range(settle):
                step()
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


def against(times: list[float], baseline: list[float], tokens: int) -> dict[str, Any]:
    """One contender's time of so many tokens, and what it adds to the baseline's: a median over rounds."""
    added = statistics.median(time / base for time, base in zip(times, baseline, strict=True)) - 1
    return {
        "overhead": added,
        "microseconds_per_token": 1e6 * min(times) / tokens,
        "microseconds_added": 1e6 * added * statistics.median(baseline) / tokens,
        "seconds": times,
    }


def spread(seconds: dict[str, list[float]], one: str, twin: str) -> float:
    """Largest deviation from 1 of the ratio of two runs of the same code: what this machine cannot resolve."""
    return max(abs(b / a - 1) for a, b in zip(seconds[one], seconds[twin], strict=True))


def peak_memory_gib(script: str, *arguments: str) -> float:
    """Of `script --memory-of <arguments>`, a process of its own that ends with `print_peak_memory`.

    Asked for while this process is small: on Linux a child's peak begins at that of its parent.
    """
    command = [sys.executable, script, "--memory-of", *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def print_peak_memory(step: Step) -> None:
    """The peak memory of two steps in GiB, of the GPU where there is one."""
    step()
    step()
    if torch.cuda.is_available():
        print(torch.cuda.max_memory_allocated() / 2**30)
    else:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def result_path(benchmark: str) -> Path:
    """Where the results of a benchmark on this machine go."""
    name = torch.cuda.get_device_name().replace(" ", "-").lower() if torch.cuda.is_available() else platform.node()
    return Path(__file__).parent / "results" / f"{benchmark}-{name}.json"


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Write results with the machine they were measured on."""
    machine = environment.describe(ranks())
    machine.pop("command")
    machine["threads"] = torch.get_num_threads()
    machine["load_average"] = os.getloadavg()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, **results}, indent=1) + "\n")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
