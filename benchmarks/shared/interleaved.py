"""A fair comparison in one process: every contender takes a turn in every round, under the same machine conditions."""

import gc
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

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


def against(times: list[float], baseline: list[float], tokens: int) -> dict[str, Any]:
    """Return a contender's time for this many tokens, and its overhead over the baseline, as a median over rounds."""
    added = statistics.median(time / base for time, base in zip(times, baseline, strict=True)) - 1
    return {
        "overhead": added,
        "microseconds_per_token": 1e6 * min(times) / tokens,
        "microseconds_added": 1e6 * added * statistics.median(baseline) / tokens,
        "seconds": times,
    }


def twin_baseline(seconds: dict[str, list[float]], name: str, twin: str) -> tuple[list[float], list[float]]:
    """Return the mean times of two contenders with the same code, and the ratios of their times."""
    pairs = list(zip(seconds[twin], seconds[name], strict=True))
    return [statistics.mean(pair) for pair in pairs], [a / b for a, b in pairs]


def twin_note(ratios: list[float], name: str) -> str:
    """Return what `twin_baseline` says of the noise of the machine."""
    noise = max((abs(value - 1) for value in ratios), default=0.0)
    median = statistics.median(ratios or [1.0])
    return f"{name} again: median {median:.3f}, single rounds differ by up to {noise:.1%}"


def spread(seconds: dict[str, list[float]], name: str, twin: str) -> float:
    """Return the largest deviation from 1 of the ratio of two runs of the same code: the noise of this machine."""
    return max(abs(b / a - 1) for a, b in zip(seconds[name], seconds[twin], strict=True))


def peak_memory_gib(make: Callable[..., Step], *arguments: Any) -> float:
    """Return the peak memory of two steps of `make(*arguments)` in a new process, of the GPU if there is one.

    Call this while this process is small, because on Linux a child's peak starts at that of its parent.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_peak_of, make, arguments).result()


def _peak_of(make: Callable[..., Step], arguments: tuple[Any, ...]) -> float:
    step = make(*arguments)
    step()
    step()
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


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


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
