"""A training step: tokens/s, MFU, launches, peak memory against the estimate, eager and compiled.

python benchmarks/first_hour/step.py [key=value ...] --size 1.5b --micro-batch 8 --output vanilla.json
"""

import statistics
import sys
from functools import partial
from typing import Any

import torch

import depthlm
from benchmarks.shared import reporting
from benchmarks.shared.decoders import training_of
from benchmarks.shared.interleaved import gpu_bytes, gpu_kernels, measure, measure_lines, peak_gib_above
from depthlm.accounting import flops_per_token
from depthlm.accounting.memory import MemoryEstimator
from depthlm.config import Config
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.machine import environment

MODES = {"eager": "false", "compiled": "true"}


def measure_step(config: Config, device: torch.device, rounds: int) -> dict[str, Any]:
    estimate = MemoryEstimator(config, device.type).estimate(config.deepspeed.stage, 1, config.training.batch_size)
    used = gpu_bytes()
    trained = training_of(config, device)
    first = measure({"step": trained.step}, rounds=1, steps=1, warmup=0)["step"][0]
    seconds = measure({"step": trained.step}, rounds, steps=1, warmup=2)["step"]
    peak = peak_gib_above(used)
    speed = trained.plan.tokens_per_step / statistics.median(seconds)
    peak_rate = environment.peak_flops(environment.device_name(device.type), config.precision.name)
    flops = flops_per_token(depthlm.build_model(config, "meta"), config.training.sequence_length).training
    return {
        "estimated_memory_gib": estimate.total / 2**30,
        "tokens_per_second": speed,
        "microseconds_per_token": 1e6 / speed,
        "mfu": speed * flops / peak_rate if peak_rate else None,
        "flops_per_token": flops,
        "first_step_seconds": first,
        "seconds": seconds,
        "peak_memory_gib": peak,
    } | (gpu_kernels(trained.step) or {})


# the columns of a measured line, and their formats
COLUMNS = {
    "tokens_per_second": ("tokens/s", ",.0f"),
    "microseconds_per_token": ("us/token", ",.1f"),
    "mfu": ("MFU", ".1%"),
    "launches": ("launches", ","),
    "gpu_seconds": ("GPU busy, s", ".3f"),
    "peak_memory_gib": ("GiB", ".1f"),
    "estimated_memory_gib": ("estimate", ".1f"),
    "first_step_seconds": ("first step, s", ".1f"),
}


def markdown(results: reporting.Results) -> str:
    """Return a table. estimate: of `depthlm summary`, in GiB. first step: with compilation."""
    lines = []
    for line in results["lines"]:
        values = [reporting.number(line.get(key), form) for key, (_, form) in COLUMNS.items()]
        if "error" in line:
            values[0] = "error"
        shape = f"{line['micro_batch_size']} x {line['sequence_length']}"
        lines.append((line["preset"], line["size"], line["mode"], shape, *values))
    header = ("preset", "size", "mode", "batch", *(title for title, _ in COLUMNS.values()))
    return reporting.headed(results, reporting.table(header, lines))


def main() -> int:
    parser = reporting.parser_of(__doc__, rounds=10)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    arguments = reporting.arguments_of(parser, markdown)
    device, jobs = start_distributed(ranks()), []
    for mode in arguments.modes:
        batch, compiled = f"training.batch_size={arguments.micro_batch}", f"training.compile={MODES[mode]}"
        config = depthlm.compose([f"size={arguments.size}", batch, "tracker=none", *arguments.overrides, compiled])
        line = {"preset": config.model.name, "size": config.size.name, "mode": mode,
                "micro_batch_size": arguments.micro_batch, "sequence_length": config.training.sequence_length,
                "precision": config.precision.name}  # fmt: skip
        jobs.append((line, partial(measure_step, config, device, arguments.rounds)))
    results: reporting.Results = {}
    measure_lines(jobs, results, arguments.output)
    reporting.publish(arguments.output, results, markdown)
    return int(any("error" in line for line in results["lines"]))


if __name__ == "__main__":
    sys.exit(main())
