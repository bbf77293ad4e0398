"""A fair comparison in one process: every contender takes a turn in every round, under the same machine conditions."""

import gc
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.shared.reporting import Results, error_text, write_json
from depthlm import ops

Step = Callable[[], object]
# kernels of a step that a result lists, and characters of their names
KERNELS, NAME = 40, 100
# operators that every decoder has
NO_DEPTH = {"cross_entropy"}


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
    for round_number in range(rounds):
        order = list(contenders.items())
        for name, step in order if round_number % 2 == 0 else reversed(order):
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


def spread(seconds: dict[str, list[float]], name: str, twin: str) -> float:
    """Return the largest deviation from 1 of the ratio of two runs of the same code: the noise of this machine."""
    return max(abs(b / a - 1) for a, b in zip(seconds[name], seconds[twin], strict=True))


def copying(size: int) -> Step:
    """Return a step that copies a tensor of this many bytes."""
    source = torch.ones(size, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


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


def gpu_kernels(step: Step) -> dict[str, Any] | None:
    """Return the launches of one step on the GPU, the seconds of all kernels, of those of the depth operators, and of
    the longest KERNELS by name. None without a GPU, or if the profiler sees no kernel.
    """
    if not torch.cuda.is_available():
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = profiler.key_averages()
    # the calls of CUDA's two interfaces: cudaLaunchKernel, cudaLaunchKernelExC, cuLaunchKernel, cuLaunchKernelEx
    launches = sum(event.count for event in events if "LaunchKernel" in event.key)
    kernels = [event for event in events if is_kernel(event)]
    if not launches or not kernels:
        return None
    kernels.sort(key=lambda event: event.self_device_time_total, reverse=True)
    longest = [
        {"name": event.key[:NAME], "launches": event.count, "seconds": event.self_device_time_total / 1e6}
        for event in kernels[:KERNELS]
    ]
    names = re.compile(depth_kernels())
    busy, depth = (
        sum(event.self_device_time_total for event in each) / 1e6
        for each in (kernels, [event for event in kernels if names.match(event.key)])
    )
    return {"launches": launches, "gpu_seconds": busy, "depth_seconds": depth, "kernels": longest}


def is_kernel(event: Any) -> bool:
    """Return whether an event of the profiler is a kernel or a copy on the GPU.

    A range that the user or PyTorch annotates, such as Optimizer.step#AdamW.step, is on the GPU's timeline as well, and
    lasts as long as the kernels in it.
    """
    is_annotation = getattr(event, "is_user_annotation", False) or "#" in event.key
    return event.device_type == DeviceType.CUDA and event.self_device_time_total > 0 and not is_annotation


def depth_kernels() -> str:
    """Return a regular expression of the names of our depth kernels: the operator's folder begins them, or `reads`."""
    folders = {path.parent.name for path in Path(ops.__file__).parent.glob("*/triton.py")}
    return f"^({'|'.join(sorted(folders - NO_DEPTH | {'reads'}))})_"


def measure_lines(
    jobs: Iterable[tuple[dict[str, Any], Callable[[], dict[str, Any]]]], results: Results, output: Path
) -> None:
    """Measure lines of a table, and write the results after each. A line that fails has an error.

    A job is a pair: the fields that identify its line, and the function that measures it.
    """
    results["lines"] = []
    for line, job in jobs:
        try:
            line = line | job()
        except Exception as error:
            # the others may succeed
            line = line | {"error": error_text(error)}
            print(f"error: {', '.join(map(str, line.values()))}", file=sys.stderr, flush=True)
        results["lines"].append(line)
        release()
        write_json(output, results)


def release() -> None:
    """Free the memory of contenders to which nothing refers any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
