"""The training step of a preset: tokens/s, MFU, launches, peak memory against the estimate, eager and compiled.

python benchmarks/first_hour/step.py [key=value ...] --size 1.5b --micro-batch 8 --output vanilla.json
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from interleaved import error_text, gpu_bytes, measure, peak_gib_above, release, write_json
from mechanisms import contender
from torch.profiler import ProfilerActivity, profile

import depthlm
from depthlm.accounting import flops_per_token
from depthlm.accounting.memory import MemoryEstimator
from depthlm.config import Config
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.machine import environment
from depthlm.training.monitoring.metrics import peak_flops

MODES = {"eager": "false", "compiled": "true"}


def launches(step: Any) -> int | None:
    """Return the kernels that one step launches; None without a GPU, or if the profiler sees none."""
    if not torch.cuda.is_available():
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    # the calls of CUDA's two interfaces: cudaLaunchKernel, cudaLaunchKernelExC, cuLaunchKernel, cuLaunchKernelEx
    return sum(event.count for event in profiler.key_averages() if "LaunchKernel" in event.key) or None


def measure_step(config: Config, overrides: list[str], device: torch.device, rounds: int) -> dict[str, Any]:
    used = gpu_bytes()
    step, tokens = contender(config.model.name, overrides, device)
    first = measure({"step": step}, rounds=1, steps=1, warmup=0)["step"][0]
    seconds = measure({"step": step}, rounds, steps=1, warmup=2)["step"]
    peak = peak_gib_above(used)
    speed = tokens / statistics.median(seconds)
    peak_rate = peak_flops(environment.device_name(device.type), config.precision.name)
    flops = flops_per_token(depthlm.build_model(config, "meta"), config.training.sequence_length).training
    return {
        "tokens_per_second": speed,
        "microseconds_per_token": 1e6 / speed,
        "mfu": speed * flops / peak_rate if peak_rate else None,
        "flops_per_token": flops,
        "first_step_seconds": first,
        "seconds": seconds,
        "peak_memory_gib": peak,
        "launches": launches(step),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--presets", nargs="+", default=["vanilla"])
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=10, help="timed steps")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_intermixed_args()
    device = start_distributed(ranks())
    results: dict[str, Any] = {"lines": []}
    for preset, mode in ((preset, mode) for preset in arguments.presets for mode in arguments.modes):
        shape = [f"size={arguments.size}", f"training.batch_size={arguments.micro_batch}", "tracker=none"]
        overrides = [*shape, *arguments.overrides, f"training.compile={MODES[mode]}"]
        config = depthlm.compose([*overrides, f"model={preset}"])
        line = {"preset": preset, "size": arguments.size, "mode": mode, "micro_batch_size": arguments.micro_batch,
                "sequence_length": config.training.sequence_length, "precision": config.precision.name}  # fmt: skip
        try:
            estimate = MemoryEstimator(config, device.type).estimate(config.deepspeed.stage, 1, arguments.micro_batch)
            line["estimated_memory_gib"] = estimate.total / 2**30
            line |= measure_step(config, overrides, device, arguments.rounds)
        except Exception as error:
            # the other mode may succeed
            line["error"] = error_text(error)
        print(line, flush=True)
        results["lines"].append(line)
        write_json(arguments.output, results)
        release()
    return int(any("error" in line for line in results["lines"]))


if __name__ == "__main__":
    sys.exit(main())
