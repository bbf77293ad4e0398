"""Training steps, one preset at a time: tokens/s, MFU, launches, memory; eager, compiled, and as CUDA graphs.

    python benchmarks/rungs/step.py [key=value ...] --size 1.5b --micro-batch 8 --output vanilla.json
    python benchmarks/rungs/step.py --modes compiled graphs --presets vanilla moda vanilla --output mechanisms.json

Only one decoder is in memory. Vanilla at the beginning and at the end shows the noise of the machine. The kernels of a
step are those that the profiler sees in the first mode of a preset.
"""

import statistics
import sys
from functools import partial
from typing import Any

import torch

import depthlm
from benchmarks import mechanisms
from benchmarks.shared import reporting
from benchmarks.shared.decoders import training_of
from benchmarks.shared.interleaved import gpu_bytes, gpu_kernels, measure, measure_lines, peak_gib_above
from depthlm.accounting.cost import flops_per_token
from depthlm.accounting.memory import MemoryEstimator
from depthlm.config import Config
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.machine import environment

# graphs: what a run does by default on a GPU; there are none on a CPU
MODES = {
    "eager": ("training.compile=false", "training.cuda_graphs=false"),
    "compiled": ("training.compile=true", "training.cuda_graphs=false"),
    "graphs": ("training.compile=auto", f"training.cuda_graphs={'true' if torch.cuda.is_available() else 'auto'}"),
}
# untimed steps after the first one, in the last of which graphs are captured
WARM_UP = 3


def measure_step(config: Config, device: torch.device, rounds: int, profiled: bool, estimated: bool) -> dict[str, Any]:
    """Measure a step. profiled: whether to list its kernels. estimated: whether to estimate its memory."""
    # PyTorch keeps few compilations of a function, and then no longer compiles it
    torch._dynamo.reset()
    used = gpu_bytes()
    trained = training_of(config, device)
    first = measure({"step": trained.step}, rounds=1, steps=1, warmup=0)["step"][0]
    seconds = measure({"step": trained.step}, rounds, steps=1, warmup=WARM_UP)["step"]
    peak = peak_gib_above(used)
    speed = trained.plan.tokens_per_step / statistics.median(seconds)
    peak_rate = environment.peak_flops(environment.device_name(device.type), config.precision.name)
    flops = flops_per_token(depthlm.build_model(config, "meta"), config.training.sequence_length).training
    line = {
        "tokens_per_second": speed,
        "microseconds_per_token": 1e6 / speed,
        "mfu": speed * flops / peak_rate if peak_rate else None,
        "flops_per_token": flops,
        "first_step_seconds": first,
        "seconds": seconds,
        "peak_memory_gib": peak,
    }
    if trained.graphs is not None:
        line |= {"captured": trained.graphs.captured, "reason": trained.graphs.reason}
    if estimated:
        memory = MemoryEstimator(config, device.type).estimate(config.deepspeed.stage, 1, config.training.batch_size)
        line["estimated_memory_gib"] = memory.total / 2**30
    if profiled:
        line |= gpu_kernels(trained.step) or {}
        if line.get("captured"):
            # a replay launches its kernels by itself
            line.pop("launches", None)
    return line


# the columns of a measured line, and their formats
COLUMNS = {
    "tokens_per_second": ("tokens/s", ",.0f"),
    "microseconds_per_token": ("us/token", ",.1f"),
    "of_vanilla": ("/ vanilla", ".3f"),
    "paper": ("paper / vanilla", ".2f"),
    "mfu": ("MFU", ".1%"),
    "launches": ("launches", ","),
    "gpu_seconds": ("GPU busy, s", ".3f"),
    "depth_seconds": ("depth kernels, s", ".4f"),
    "peak_memory_gib": ("GiB", ".1f"),
    "estimated_memory_gib": ("estimate", ".1f"),
    "first_step_seconds": ("first step, s", ".1f"),
}


def markdown(results: reporting.Results) -> str:
    """Return a table without the columns that are empty in all lines.

    / vanilla: times as long as the mean of vanilla's turns in the same mode. estimate: of `depthlm summary`, in GiB.
    first step: with compilation.
    """
    lines, rows, notes = results["lines"], [], []
    for line in lines:
        shown = dict(line)
        if results.get("compared"):
            turns = [x for x in lines if (x["preset"], x["mode"]) == ("vanilla", line["mode"])]
            vanilla = [x["microseconds_per_token"] for x in turns if "microseconds_per_token" in x]
            if "microseconds_per_token" in line and vanilla:
                shown["of_vanilla"] = line["microseconds_per_token"] / statistics.mean(vanilla)
            shown["paper"] = read_paper(line["size"], line["preset"])
        values = [reporting.number(shown.get(key), form) for key, (_, form) in COLUMNS.items()]
        if "error" in line:
            values[0] = "error"
        shape = f"{line['micro_batch_size']} x {line['sequence_length']}"
        rows.append([line["preset"], line["size"], line["mode"], shape, *values])
        if reason := line.get("reason"):
            notes.append(f"{line['preset']} without graphs: {reason}")
    header = ["preset", "size", "mode", "batch", *(title for title, _ in COLUMNS.values())]
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    header, *rows = ([row[i] for i in kept] for row in (header, *rows))
    return reporting.headed(results, reporting.table(header, rows), *notes)


def read_paper(size: str, preset: str) -> float | None:
    """Return how many times as long as vanilla's the step of a paper's variant of this preset takes, at this size."""
    name = f"depth_attention_step_{size}"
    if not (reporting.TABLES / f"{name}.yaml").exists():
        return None
    # a row is a preset, which may be a variant of this one, and its settings
    rows = {row.split()[0]: 1 + overhead for row, overhead in mechanisms.read_table(name)[1].items()}
    return next((time for row, time in rows.items() if row == preset or row.startswith(f"{preset}_")), None)


def main() -> int:
    parser = reporting.parser_of(__doc__, rounds=10)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--presets", nargs="+", metavar="PRESET", help="mechanisms, one row each")
    which.add_argument("--except", nargs="+", dest="others", metavar="PRESET", help="all mechanisms but these")
    arguments = reporting.arguments_of(parser, markdown)
    device, jobs = start_distributed(ranks()), []
    presets = [f"model={name}" for name in arguments.presets or ()]
    if arguments.others:
        presets = [f"model={name}" for name in depthlm.config.mechanisms() if name not in arguments.others]
    for preset in presets or [None]:
        for mode in arguments.modes:
            settings = [f"size={arguments.size}", f"training.batch_size={arguments.micro_batch}", "tracker=none"]
            settings += [preset] if preset else []
            config = depthlm.compose([*settings, *arguments.overrides, *MODES[mode]])
            line = {"preset": config.model.name, "size": config.size.name, "mode": mode,
                    "micro_batch_size": arguments.micro_batch, "sequence_length": config.training.sequence_length,
                    "precision": config.precision.name}  # fmt: skip
            flags = {"profiled": mode == arguments.modes[0], "estimated": not presets}
            jobs.append((line, partial(measure_step, config, device, arguments.rounds, **flags)))
    results: reporting.Results = {"compared": bool(presets)}
    measure_lines(jobs, results, arguments.output)
    reporting.publish(arguments.output, results, markdown)
    return int(any("error" in line for line in results["lines"]))


if __name__ == "__main__":
    sys.exit(main())
