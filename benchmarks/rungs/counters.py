"""What limits each kernel of the depth operators, by the counters of Nsight Compute.

    python benchmarks/rungs/counters.py [--size 1.5b] [--operators gated_reads] --output counters.json

`ncu` runs one operator after the other, forward and backward, at a micro-batch of 4 x 2,048 in bf16, and counts what
each of our kernels does. It replays a kernel several times, so the times are those of single launches at the clock of
that moment. The raw counters are in the output of this script.
"""

import csv
import io
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared import reporting
from benchmarks.shared.interleaved import depth_kernels, measure_lines
from benchmarks.shared.operators import CASES, Make, shape_of, step

BATCH, LENGTH = 4, 2048
SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats", "WarpStateStats", "MemoryWorkloadAnalysis")
# our names of ncu's counters, in its base units
COUNTERS = {
    "nanoseconds": "gpu__time_duration.sum",
    "dram_bytes_per_second": "dram__bytes.sum.per_second",
    "dram_percent": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l1_percent": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps_active_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "l1_hit_percent": "l1tex__t_sector_hit_rate.pct",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "registers": "launch__registers_per_thread",
    "shared_memory": "launch__shared_mem_per_block",
    "blocks_by_registers": "launch__occupancy_limit_registers",
    "blocks_by_shared_memory": "launch__occupancy_limit_shared_mem",
}
# cycles that a warp waits per instruction, by reason; those below a threshold are not kept
STALLS, LEAST = ("smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"), 0.5


def count(operator: str, size: str) -> dict[str, Any]:
    """Run an operator under ncu, and return its kernels."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    chosen = ["-k", f"regex:{depth_kernels()}", "--profile-from-start", "off", "--clock-control", "none"]
    shown = ["--csv", "--page", "raw", "--print-units", "base"]
    command = ["ncu", *chosen, *shown, *sections, sys.executable, str(Path(__file__).resolve())]
    # ncu saves and restores what a kernel writes, which is simplest with ordinary memory
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [*command, "--run", operator, "--size", size], env=environment, capture_output=True, text=True
    )
    print(done.stdout, done.stderr, sep="\n", flush=True)
    kernels = parse(done.stdout)
    if done.returncode or not kernels:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise RuntimeError(f"ncu: exit status {done.returncode}, {len(kernels)} kernels; {' '.join(last)}")
    return {"kernels": kernels}


def parse(output: str) -> list[dict[str, Any]]:
    """Return the kernels in ncu's table: a line of names, a line of units, and a line per launch."""
    lines = output.splitlines()
    begin = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[begin:]))))
    return [kernel_of(row) for row in rows if (row.get("ID") or "").isdigit()]


def kernel_of(row: dict[str, str]) -> dict[str, Any]:
    kernel: dict[str, Any] = {"kernel": row["Kernel Name"], "grid": row["Grid Size"], "block": row["Block Size"]}
    kernel |= {name: number_of(row.get(counter)) for name, counter in COUNTERS.items()}
    begin, end = STALLS
    stalls = {name[len(begin) : -len(end)]: number_of(row[name]) for name in row if name and name.startswith(begin)}
    kernel["stalls"] = {reason: value for reason, value in stalls.items() if value is not None and value >= LEAST}
    return kernel


def number_of(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def run(operator: str, size: str) -> None:
    """Run an operator twice, and let ncu see the second time."""
    shape = shape_of(size, BATCH, LENGTH)
    case = CASES[operator](shape, Make(torch.Generator("cuda").manual_seed(0), torch.bfloat16))
    turn = step(case.run, case.inputs, "triton")
    turn()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    turn()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


SHOWN = {
    "nanoseconds": ("us", 1e-3, ",.0f"),
    "dram_bytes_per_second": ("GB/s", 1e-9, ",.0f"),
    "dram_percent": ("DRAM", 0.01, ".0%"),
    "l2_percent": ("L2", 0.01, ".0%"),
    "l1_percent": ("L1", 0.01, ".0%"),
    "sm_percent": ("SM", 0.01, ".0%"),
    "warps_active_percent": ("warps", 0.01, ".0%"),
    "registers": ("registers", 1, ".0f"),
}


def markdown(results: reporting.Results) -> str:
    """Return a table of kernels. The longest stalls: cycles that a warp waits per instruction."""
    rows = []
    for line in results["lines"]:
        if "error" in line:
            rows.append([line["operator"], "error", *[""] * (len(SHOWN) + 1)])
        for kernel in line.get("kernels", ()):
            values = [(kernel.get(name), factor, form) for name, (_, factor, form) in SHOWN.items()]
            cells = ["" if value is None else f"{factor * value:{form}}" for value, factor, form in values]
            stalls = sorted(kernel["stalls"].items(), key=lambda stall: -stall[1])
            waits = ", ".join(f"{reason} {cycles:.1f}" for reason, cycles in stalls if reason != "selected")
            rows.append([line["operator"], kernel["kernel"], *cells, waits])
    header = ("operator", "kernel", *(title for title, _, _ in SHOWN.values()), "stalls")
    return reporting.headed(results, reporting.table(header, rows))


def main() -> int:
    parser = reporting.parser_of(__doc__)
    parser.add_argument("--size", default="1.5b", help="of conf/size")
    parser.add_argument("--operators", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--run", choices=CASES, help="only run this operator, under ncu")
    arguments = reporting.arguments_of(parser, markdown)
    if arguments.run:
        run(arguments.run, arguments.size)
        return 0
    jobs = (({"operator": name}, partial(count, name, arguments.size)) for name in arguments.operators)
    results: reporting.Results = {"size": arguments.size, "batch": BATCH, "length": LENGTH}
    measure_lines(jobs, results, arguments.output)
    reporting.publish(arguments.output, results, markdown)
    return int(any("error" in line for line in results["lines"]))


if __name__ == "__main__":
    sys.exit(main())
