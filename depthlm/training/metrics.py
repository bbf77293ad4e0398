"""What a run measures: metrics.jsonl, the clock, peak memory, utilisation."""

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from depthlm.files import replace_text

# dense bf16 (or fp16) TFLOP/s by the name torch gives, from the makers' data sheets, without sparsity
PEAK_TFLOPS = {
    "NVIDIA B200": 2250,
    "NVIDIA H200": 989,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA L40S": 362,
    "NVIDIA A40": 150,
    "NVIDIA L4": 121,
    "NVIDIA GeForce RTX 4090": 165,
    "NVIDIA GeForce RTX 3090": 71,
    "Tesla V100-SXM2-16GB": 125,
    "Tesla V100-SXM2-32GB": 125,
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of the device, or None for one we do not know, a part of one (MIG) or fp32: a wrong guess is worse."""
    tflops = PEAK_TFLOPS.get(device_name)
    return None if tflops is None or precision == "fp32" else tflops * 1e12


def peak_memory_gib(device: torch.device) -> float:
    """The most memory so far: of the GPU's allocator, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 2**30


class MetricsFile:
    """metrics.jsonl: one object a logged step, appended whole and flushed; on other ranks than the first, nothing."""

    def __init__(self, path: Path | None, after_step: int) -> None:
        """Open for appending; rows of steps after `after_step`, and a torn last one, are cut off."""
        self.path = path
        self.last: dict[str, Any] = {}
        if path is not None:
            rows = [row for row in read_metrics(path) if row["step"] <= after_step]
            replace_text(path, "".join(json.dumps(row) + "\n" for row in rows))
            self.last = rows[-1] if rows else {}

    @property
    def validated(self) -> bool:
        """Whether the newest row has its validation losses."""
        return any(name.startswith("validation/") for name in self.last)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row."""
        self.last = row
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def amend(self, values: dict[str, Any]) -> None:
        """Add values to the newest row."""
        row = {**self.last, **values}
        if self.path is not None:
            size = self.path.stat().st_size - len(json.dumps(self.last)) - 1
            os.truncate(self.path, size)
        self.write(row)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole row of a metrics.jsonl; none where there is no file."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


class Stopwatch:
    """Seconds spent in training steps; pauses leave out validation and saving."""

    def __init__(self, seconds_before: float = 0.0) -> None:
        self.total = seconds_before
        self.lap = 0.0
        self.started: float | None = None

    def start(self) -> None:
        """Go on."""
        self.started = time.perf_counter()

    def pause(self) -> None:
        """Hold, adding what has passed to the lap and to the total."""
        if self.started is not None:
            passed = time.perf_counter() - self.started
            self.total += passed
            self.lap += passed
            self.started = None

    def take_lap(self) -> float:
        """Seconds since the last lap, pauses left out; begins another."""
        running = self.started is not None
        self.pause()
        seconds, self.lap = self.lap, 0.0
        if running:
            self.start()
        return seconds
