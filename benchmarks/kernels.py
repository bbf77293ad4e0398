"""Every depth operator, forward and backward: Triton kernels, PyTorch reference, and the floor of its memory traffic.

    python benchmarks/kernels.py [--size 1.5b 3b] [--length 2048 4096] [--operators mhc_post_pre] [--rounds 8]
    python benchmarks/kernels.py --table moda_efficiency     # the settings of MoDA's table, against flash attention

In bf16 on a GPU. On a CPU only PyTorch is timed, in fp32 and at T 512, because Triton's kernels need a GPU. The results
of both are compared before they are timed. The floor is the time in which this machine, in the same rounds, copies as
many bytes as the operator must move (`operators.py`); the floor of merged_attention also includes flash attention's own
time. Times are those of the fastest turn; comparisons of two contenders are medians over rounds.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from interleaved import Step, error_text, measure, ratio, release, result_path, spread, write_json
from operators import CASES, TABLES, Case, Make, Shape, difference, read_table, shape_of, step
from rich.console import Console
from rich.progress import track
from rich.table import Table

from depthlm.machine import environment
from depthlm.ops.backend import missing

CUDA = torch.cuda.is_available()
TYPE = torch.bfloat16 if CUDA else torch.float32
# most steps per turn: the launches of one step overlap with the kernels of the previous step
STEPS = 10 if CUDA else 1
# a turn whose steps take this many seconds needs no more of them
ENOUGH = 0.1
COPIED = 2**30 if CUDA else 2**28
# the allowed difference between both, relative to the largest value of a tensor
TOLERANCE = 2e-2 if CUDA else 1e-4
# the same code a second time, which shows the noise of the machine
AGAIN = "again"


class Job(NamedTuple):
    """One line of the table. paper: the paper's overhead over flash attention, relative to flash attention's time."""

    operator: str
    setting: str
    shape: Shape
    paper: float | None = None


def jobs_of(sizes: list[str], lengths: list[int], batch: int, operators: list[str]) -> list[Job]:
    shapes = {f"{size}, T {length}": shape_of(size, batch, length) for size in sizes for length in lengths}
    return [Job(name, setting, shape) for setting, shape in shapes.items() for name in operators]


def jobs_of_table(name: str, divisor: int) -> list[Job]:
    """Return the settings of a table. divisor: of the lengths, entries and heads, for a test on a CPU."""
    jobs = []
    for row, shape in read_table(name):
        shape = shape._replace(
            length=max(1, shape.length // divisor),
            entries=max(1, shape.entries // divisor),
            h=max(shape.k, shape.h // divisor),
        )
        setting = f"({row['row']}) T {shape.length}, G {shape.h // shape.k}, {shape.entries} entries"
        jobs.append(Job("merged_attention", setting, shape, row["moda_ms"] / row["flash_ms"] - 1))
    return jobs


def time_job(job: Job, kinds: list[str], rounds: int) -> dict[str, Any]:
    """Return one line of the results, without seconds if Triton's kernels and PyTorch differ."""
    device = environment.device_type()
    case = CASES[job.operator](job.shape, Make(torch.Generator(device).manual_seed(0), TYPE))
    steps = {kind: step(case.run, case.inputs, kind) for kind in kinds}
    outputs = {}
    for kind in kinds:
        try:
            outputs[kind] = steps[kind]()
        except torch.OutOfMemoryError:
            # the reference needs more memory than the kernels, which are then timed alone
            if kind == kinds[0]:
                raise
            del steps[kind]
    different = difference(*outputs.values()) if len(outputs) > 1 else None
    del outputs
    tokens = job.shape.batch * job.shape.length
    line: dict[str, Any] = {
        "operator": job.operator,
        "setting": job.setting,
        "shape": job.shape._asdict(),
        "tokens": tokens,
        "bytes": case.values * tokens * TYPE.itemsize,
        "difference": different,
        "paper_added_to_flash": job.paper,
    }
    if line["difference"] is not None and not line["difference"] <= TOLERANCE:
        return line
    return line | times(case, steps, rounds, line["bytes"])


def times(case: Case, steps: dict[str, Step], rounds: int, moved: int) -> dict[str, Any]:
    """Return the seconds of every contender, and derived results. moved: bytes of the floor."""
    first = next(iter(steps))
    flash = {} if case.flash is None else {"flash": step(case.flash, case.inputs[:3], first)}
    contenders = {**steps, AGAIN: steps[first], **flash, "copy": copying()}
    seconds = measure(contenders, rounds, steps_per_turn(steps[first]), settle=1)
    speed = 2 * COPIED / min(seconds["copy"])
    floor = moved / speed + (min(seconds["flash"]) if flash else 0.0)
    return {
        "seconds": seconds,
        "copied_bytes_per_second": speed,
        "floor_seconds": floor,
        "times_floor": {name: min(seconds[name]) / floor for name in steps},
        "times_as_fast": ratio(seconds, "triton", "torch") if len(steps) > 1 else None,
        "again": spread(seconds, first, AGAIN),
        "added_to_flash": {name: 1 / ratio(seconds, name, "flash") - 1 for name in steps} if flash else None,
    }


def steps_per_turn(turn: Step) -> int:
    """Return the steps of a turn: many of a fast operator, one of a slow one."""
    turn()
    seconds = measure({"": turn}, rounds=1, steps=1, warmup=0)[""][0]
    return max(1, min(STEPS, round(ENOUGH / seconds)))


def copying() -> Step:
    """Return a step that copies a tensor too large for a GPU's cache."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=environment.device_type())
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=("1.5b", "3b"), default=["1.5b", "3b"] if CUDA else ["1.5b"])
    parser.add_argument("--length", nargs="+", type=int, default=[2048, 4096] if CUDA else [512], help="tokens, T")
    parser.add_argument("--batch", type=int, default=4 if CUDA else 1, help="sequences")
    parser.add_argument("--operators", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--table", choices=sorted(path.stem for path in TABLES.glob("*.yaml")), help="a paper's table")
    parser.add_argument(
        "--divide", type=int, default=1, metavar="N", help="--table: shapes N times smaller, on any device"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=environment.cores(), help="CPU threads (default: all cores)")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the results of an earlier run as Markdown")
    arguments = parser.parse_args()
    if arguments.markdown:
        print(markdown(json.loads(arguments.markdown.read_text())))
        return 0
    if arguments.table and not CUDA and arguments.divide == 1:
        parser.error(
            f"--table {arguments.table}: its shapes need a GPU, and this machine has none; --divide reduces them"
        )
    unavailable = missing("cuda") if CUDA else "Triton's kernels need a GPU"
    kinds = ["torch"] if unavailable else ["triton", "torch"]
    if unavailable:
        print(f"{unavailable}: only PyTorch is timed")
    torch.set_num_threads(arguments.threads)
    if arguments.table:
        jobs = jobs_of_table(arguments.table, arguments.divide)
    else:
        jobs = jobs_of(arguments.size, arguments.length, arguments.batch, arguments.operators)
    results: dict[str, Any] = {"timed": kinds, "type": str(TYPE), "tolerance": TOLERANCE, "lines": []}
    output = arguments.output or result_path(arguments.table or "kernels")
    for job in track(jobs, "timing", transient=True):
        try:
            results["lines"].append(time_job(job, kinds, arguments.rounds))
        except Exception as error:
            # the other operators may succeed
            results["lines"].append(
                {"operator": job.operator, "setting": job.setting, "paper_added_to_flash": job.paper,
                 "error": error_text(error)}
            )  # fmt: skip
        release()
        write_json(output, results)
    Console(highlight=False).print(table(results))
    for line in results["lines"]:
        if "error" in line:
            print(f"error: {line['operator']}, {line['setting']}: {line['error']}", file=sys.stderr)
    print(f"written to {output}")
    return int(any("seconds" not in line for line in results["lines"]))


COLUMNS = ("operator", "setting", "MB", "floor ms", "PyTorch ms", "Triton ms", "times as fast", "PyTorch / floor",
           "Triton / floor", "PyTorch + flash", "Triton + flash", "paper")  # fmt: skip


def cells(line: dict[str, Any]) -> list[str]:
    """Return the cells of one line, empty where nothing was measured."""
    paper = line["paper_added_to_flash"]
    shown = [line["operator"], line["setting"]]
    if "error" in line:
        return [*shown, "", "error", *[""] * 7, "" if paper is None else f"{paper:+.1%}"]
    shown.append(f"{line['bytes'] / 1e6:,.0f}")
    if "seconds" not in line:
        return [*shown, f"differ by {line['difference']:.1e}", *[""] * 7, "" if paper is None else f"{paper:+.1%}"]
    kinds = ("torch", "triton")
    milliseconds = {name: 1e3 * min(times) for name, times in line["seconds"].items()}
    added = line["added_to_flash"] or {}
    return [
        *shown,
        f"{1e3 * line['floor_seconds']:.3g}",
        *(f"{milliseconds[kind]:.3g}" if kind in milliseconds else "" for kind in kinds),
        f"{line['times_as_fast']:.2f}" if line["times_as_fast"] else "",
        *(f"{line['times_floor'][kind]:.2f}" if kind in line["times_floor"] else "" for kind in kinds),
        *(f"{added[kind]:+.1%}" if kind in added else "" for kind in kinds),
        "" if paper is None else f"{paper:+.1%}",
    ]


def filled(results: dict[str, Any]) -> list[list[str]]:
    """Return the header and the lines, without the columns that are empty in all lines."""
    lines = [cells(line) for line in results["lines"]]
    kept = [i for i in range(len(COLUMNS)) if any(line[i] for line in lines)]
    return [[line[i] for i in kept] for line in (COLUMNS, *lines)]


def notes(results: dict[str, Any]) -> str:
    measured = [line for line in results["lines"] if "seconds" in line]
    speeds = [line["copied_bytes_per_second"] / 1e9 for line in measured] or [0.0]
    again = max((line["again"] for line in measured), default=0.0)
    return (
        f"{results['type'].removeprefix('torch.')}; copies at {min(speeds):.1f} to {max(speeds):.1f} GB/s; "
        f"the same code again: single rounds differ by up to {again:.1%}"
    )


def table(results: dict[str, Any]) -> Table:
    header, *lines = filled(results)
    shown = Table(*header, caption=notes(results))
    for line in lines:
        shown.add_row(*line)
    return shown


def markdown(results: dict[str, Any]) -> str:
    machine, (header, *lines) = results["machine"], filled(results)
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    text = [f"{machine['device']}, {threads}, torch {machine['versions']['torch']}; {notes(results)}:", ""]
    text += [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    return "\n".join([*text, *(f"| {' | '.join(line)} |" for line in lines)])


if __name__ == "__main__":
    sys.exit(main())
