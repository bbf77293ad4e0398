"""A fair comparison in one process: every contender takes a turn in every round, under the same machine conditions."""

import gc
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

from depthlm.files import replace_text
from depthlm.machine import environment

Step = Callable[[], object]


def measure(
    contenders: dict[str, Step], rounds: int, steps: int, warmup: int = 2, settle: int = 0
) -> dict[str, list[float]]:
    """Return the seconds of one step of each contender in each round. The order alternates between rounds.

    settle: untimed steps at the beginning of a turn, which replace the previous contender's data in caches and heap.
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
    """Return how many times as fast `ours` is: the median over rounds of the ratio within a round."""
    return statistics.median(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True))


def against(times: list[float], baseline: list[float], tokens: int) -> dict[str, Any]:
    """Return a contender's time for this many tokens, and its overhead over the baseline, as a median over rounds."""
    added = statistics.median(time / base for time, base in zip(times, baseline, strict=True)) - 1
    return {
        "overhead": added,
        "microseconds_per_token": 1e6 * min(times) / tokens,
        "microseconds_added": 1e6 * added * statistics.median(baseline) / tokens,
        "seconds": times,
    }


def spread(seconds: dict[str, list[float]], one: str, twin: str) -> float:
    """Return the largest deviation from 1 of the ratio of two runs of the same code: the noise of this machine."""
    return max(abs(b / a - 1) for a, b in zip(seconds[one], seconds[twin], strict=True))


def peak_memory_gib(script: str, *arguments: str) -> float:
    """Return the peak memory of `script --memory-of <arguments>`, a separate process that calls `print_peak_memory`.

    Call this while the process is small, because on Linux a child's peak starts at that of its parent.
    """
    command = [sys.executable, script, "--memory-of", *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def print_peak_memory(step: Step) -> None:
    """Print the peak memory of two steps in GiB, of the GPU if there is one."""
    step()
    step()
    if torch.cuda.is_available():
        print(torch.cuda.max_memory_allocated() / 2**30)
    else:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def gpu_bytes() -> int:
    """Begin a new record of the GPU's peak memory, and return the bytes in use; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_gib_above(used: int) -> float | None:
    """Return the GPU's peak memory since the last `gpu_bytes`, above these bytes, in GiB; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - used) / 2**30


def release() -> None:
    """Free the memory of contenders to which nothing refers any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def error_text(error: Exception) -> str:
    """Return an error in one line, for a result that could not be measured."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def result_path(benchmark: str) -> Path:
    """Return the path for the results of a benchmark on this machine."""
    name = torch.cuda.get_device_name().replace(" ", "-").lower() if torch.cuda.is_available() else platform.node()
    return Path(__file__).parent / "results" / f"{benchmark}-{name}.json"


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Write results together with the machine that they were measured on. An interruption leaves the earlier file."""
    machine = environment.describe(environment.device_type())
    for name in ("command", "code"):
        machine.pop(name)
    machine["threads"] = torch.get_num_threads()
    machine["load_average"] = os.getloadavg()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps({"machine": machine, **results}, indent=1) + "\n")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
