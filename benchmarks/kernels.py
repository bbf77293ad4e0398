"""Every depth operator, forward and backward: Triton kernels, PyTorch, and the floor of its memory traffic.

    python benchmarks/kernels.py [--size 1.5b 3b] [--length 2048 4096] [--rounds 8]
    python benchmarks/kernels.py --table moda_efficiency     # the settings of MoDA's table, against flash attention
    python benchmarks/kernels.py --compiled                  # on a CPU: also the definitions under torch.compile

In bf16 on a GPU. On a CPU, PyTorch's operators (`cpu.py`) are compared with their definitions (`naive.py`), in fp32 and
at T 512, because Triton's kernels need a GPU. The results of both are compared before they are timed. The floor is the
time in which this machine, in the same rounds, copies as many bytes as the operator must move (`shared/operators.py`);
the floor of merged_attention also includes the time of flash attention. Times are those of the fastest turn;
comparisons of two contenders are medians over rounds.
"""

import sys
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.progress import track

from benchmarks.shared import reporting
from benchmarks.shared.interleaved import Step, copying, gpu_kernels, measure, measure_lines, ratio, spread
from benchmarks.shared.operators import CASES, Case, Make, Shape, difference, shape_of, step
from depthlm.machine import environment
from depthlm.ops.backend import missing

TABLES = reporting.TABLES / "kernels"
CUDA = torch.cuda.is_available()
TYPE = torch.bfloat16 if CUDA else torch.float32
# sequences
BATCH = 4 if CUDA else 1
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
    """One line of the table. paper: its overhead over flash attention, relative to flash attention's time."""

    operator: str
    setting: str
    shape: Shape
    paper: float | None = None


def jobs_of_table(name: str, divisor: int) -> list[Job]:
    """Return a paper's settings of MoDA. divisor: of the lengths, entries and heads, for a test on a CPU."""
    jobs, table = [], reporting.read_table(TABLES, name)
    for values in table["rows"]:
        row = dict(zip(table["columns"], values, strict=True))
        length, entries = (max(1, row[key] // divisor) for key in ("length", "entries"))
        k, e = row["num_kv_heads"], table["head_size"]
        h = max(k, row["num_heads"] // divisor)
        shape = Shape(table["batch_size"], length, row["num_heads"] * e, layers=0, h=h, k=k, e=e, entries=entries)
        setting = f"({row['row']}) T {length}, G {h // k}, {entries} entries"
        jobs.append(Job("merged_attention", setting, shape, row["moda_ms"] / row["flash_ms"] - 1))
    return jobs


def time_job(job: Job, backends: list[str], rounds: int) -> dict[str, Any]:
    """Return the results of a job, without seconds if the contenders differ."""
    device = environment.device_type()
    case = CASES[job.operator](job.shape, Make(torch.Generator(device).manual_seed(0), TYPE))
    # a job must not use up the recompilations of the next
    torch._dynamo.reset()
    steps = {backend: step(case.run, case.inputs, backend) for backend in backends}
    outputs = {}
    for backend in backends:
        try:
            outputs[backend] = steps[backend]()
        except torch.OutOfMemoryError:
            # the second contender needs more memory than the first, which is then timed alone
            if backend == backends[0]:
                raise
            del steps[backend]
    first, *others = outputs.values()
    differences = [difference(first, other) for other in others]
    # torch's max propagates a NaN, Python's max ignores it
    different = torch.tensor(differences).max().item() if differences else None
    del outputs, first, others
    tokens = job.shape.batch * job.shape.length
    line: dict[str, Any] = {
        "shape": job.shape._asdict(),
        "tokens": tokens,
        "bytes": case.values * tokens * TYPE.itemsize,
        "difference": different,
    }
    if different is not None and not different <= TOLERANCE:
        return line
    return line | times(case, steps, rounds, line["bytes"])


def times(case: Case, steps: dict[str, Step], rounds: int, moved: int) -> dict[str, Any]:
    """Return the seconds of every contender, and derived results. moved: bytes of the floor."""
    first, *others = steps
    flash = {} if case.flash is None else {"flash": step(case.flash, case.inputs[:3], first)}
    contenders = {**steps, AGAIN: steps[first], **flash, "copy": copying(COPIED)}
    seconds = measure(contenders, rounds, steps_per_turn(steps[first]), settle=1)
    speed = 2 * COPIED / min(seconds["copy"])
    floor = moved / speed + (min(seconds["flash"]) if flash else 0.0)
    return {
        "gpu": gpu_kernels(steps[first]),
        "seconds": seconds,
        "copied_bytes_per_second": speed,
        "floor_seconds": floor,
        "times_floor": {name: min(seconds[name]) / floor for name in steps},
        "times_as_fast": ratio(seconds, first, others[0]) if others else None,
        "again": spread(seconds, first, AGAIN),
        "added_to_flash": {name: 1 / ratio(seconds, name, "flash") - 1 for name in steps} if flash else None,
    }


def steps_per_turn(turn: Step) -> int:
    """Return the steps of a turn: many of a fast operator, one of a slow one."""
    turn()
    seconds = measure({"": turn}, rounds=1, steps=1, warmup=0)[""][0]
    return max(1, min(STEPS, round(ENOUGH / seconds)))


COLUMNS = ("operator", "setting", "MB", "floor ms", "definition ms", "PyTorch ms", "Triton ms", "of it GPU",
           "compiled ms", "times as fast", "as compiled", "PyTorch / floor", "Triton / floor", "PyTorch + flash",
           "Triton + flash", "paper")  # fmt: skip
BACKENDS = {"naive": "definition", "torch": "PyTorch", "triton": "Triton", "compiled": "compiled"}


def markdown(results: reporting.Results) -> str:
    """Return a table without the columns that are empty in all lines."""
    lines = [cells(line) for line in results["lines"]]
    kept = [i for i in range(len(COLUMNS)) if any(line[i] for line in lines)]
    header, *lines = ([line[i] for i in kept] for line in (COLUMNS, *lines))
    measured = [line for line in results["lines"] if "seconds" in line]
    speeds = [line["copied_bytes_per_second"] / 1e9 for line in measured] or [0.0]
    again = max((line["again"] for line in measured), default=0.0)
    copies = f"{results['type'].removeprefix('torch.')}; copies at {min(speeds):.1f} to {max(speeds):.1f} GB/s"
    return reporting.headed(
        results,
        reporting.table(header, lines),
        copies,
        f"the same code again: single rounds differ by up to {again:.1%}",
    )


def cells(line: dict[str, Any]) -> list[str]:
    """Return the cells of one line, empty where nothing was measured."""
    shown = {"operator": line["operator"], "setting": line["setting"]}
    if (paper := line["paper_added_to_flash"]) is not None:
        shown["paper"] = f"{paper:+.1%}"
    if "bytes" in line:
        shown["MB"] = f"{line['bytes'] / 1e6:,.0f}"
    if "error" in line:
        shown["floor ms"] = "error"
    elif "seconds" not in line:
        shown["floor ms"] = f"differ by {line['difference']:.1e}"
    else:
        shown["floor ms"] = f"{1e3 * line['floor_seconds']:.3g}"
        shown["times as fast"] = f"{line['times_as_fast']:.2f}" if line["times_as_fast"] else ""
        if gpu := line.get("gpu"):
            shown["of it GPU"] = f"{1e3 * gpu['gpu_seconds']:.3g}"
        if "compiled" in line["seconds"]:
            shown["as compiled"] = f"{ratio(line['seconds'], 'torch', 'compiled'):.2f}"
        for backend, name in BACKENDS.items():
            if backend in line["times_floor"]:
                shown[f"{name} ms"] = f"{1e3 * min(line['seconds'][backend]):.3g}"
                shown[f"{name} / floor"] = f"{line['times_floor'][backend]:.2f}"
            if line["added_to_flash"] and backend in line["added_to_flash"]:
                shown[f"{name} + flash"] = f"{line['added_to_flash'][backend]:+.1%}"
    return [shown.get(column, "") for column in COLUMNS]


def main() -> int:
    parser = reporting.parser_of(__doc__, rounds=8, threads=environment.cores())
    parser.add_argument("--size", nargs="+", default=["1.5b", "3b"] if CUDA else ["1.5b"], help="of conf/size")
    parser.add_argument("--length", nargs="+", type=int, default=[2048, 4096] if CUDA else [512], help="tokens, T")
    reporting.add_table(parser, TABLES)
    parser.add_argument("--compiled", action="store_true", help="on a CPU: the definitions under torch.compile too")
    parser.add_argument("--divide", type=int, default=1, metavar="N", help="--table: N times smaller, on any device")
    arguments = reporting.arguments_of(parser, markdown)
    if arguments.table and not CUDA and arguments.divide == 1:
        parser.error(
            f"--table {arguments.table}: its shapes need a GPU, and this machine has none; --divide reduces them"
        )
    if arguments.compiled and CUDA:
        parser.error("--compiled: only on a CPU; on a GPU, Triton's kernels are compared with PyTorch's operators")
    backends = ["triton", "torch"]
    if unavailable := missing("cuda") if CUDA else "Triton's kernels need a GPU":
        backends = ["torch", "naive", *(["compiled"] if arguments.compiled else [])]
        print(f"{unavailable}: PyTorch's operators are compared with their definitions")
    if arguments.table:
        jobs = jobs_of_table(arguments.table, arguments.divide)
    else:
        shapes = [(size, length) for size in arguments.size for length in arguments.length]
        jobs = [
            Job(name, f"{size}, T {length}", shape_of(size, BATCH, length)) for size, length in shapes for name in CASES
        ]
    results: reporting.Results = {"timed": backends, "type": str(TYPE), "tolerance": TOLERANCE}
    output = arguments.output or reporting.result_path(arguments.table or "kernels")
    named = (
        (
            {"operator": job.operator, "setting": job.setting, "paper_added_to_flash": job.paper},
            partial(time_job, job, backends, arguments.rounds),
        )
        for job in track(jobs, "timing", transient=True)
    )
    measure_lines(named, results, output)
    reporting.publish(output, results, markdown)
    return int(any("seconds" not in line for line in results["lines"]))


if __name__ == "__main__":
    sys.exit(main())
