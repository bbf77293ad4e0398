"""Find the fastest tiles, warps and programs of the Triton kernels on this GPU, and write depthlm/ops/tiles.py.

    python benchmarks/tune.py [--minutes 5] [--kernels dca mhc] [--dry-run]
    python benchmarks/tune.py --rehearse          # in Triton's interpreter, at tiny shapes; writes no tiles

Each constant is halved and doubled. Processes side by side compile the kernels with each of these candidates, and
compare their results with those of the present constants. Candidates with the same results are timed one after the
other, at the shapes and dtypes of a step at 1.5b with 4 x 2,048 tokens. The best one of each group of kernels is kept
if it takes less than 97% of the time. Another run begins with these constants; --kernels selects groups.
"""

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

# depthlm need not be installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shared import reporting
from depthlm.files import replace_text

# the operators of benchmarks/shared/operators.py that run a group of kernels, the most expensive group first
OPERATORS = {
    "dca": ["gated_reads", "gated_reads_later"],
    "attention_residuals": ["depth_attend_full", "depth_attend_half"],
    "denseformer": ["weighted_reads"],
    "reads": ["weighted_reads", "gated_reads"],
    "attention_residuals_few": ["depth_attend_block", "depth_attend_later"],
    "streams": ["mhc_post_pre", "hyper_post_pre"],
    "mhc": ["mhc_post_pre"],
    "hyper_connections": ["hyper_post_pre"],
    "moda": ["merged_attention"],
    "depth_attention": ["depth_value_mix"],
}
# a candidate replaces the present constants if it takes less than this share of their time
GAIN = 0.97
# the allowed difference of results, relative to the largest value of a tensor
TOLERANCE = 2e-2
# bytes of GPU memory that a process needs
MEMORY = 8 * 2**30
BATCH, LENGTH, ROUNDS = 4, 2048, 9

NO_TIME = "no time was left"

Tiles = dict[str, dict[str, int]]


class Candidate(NamedTuple):
    """Constants of a group of kernels. change: in words."""

    kernels: str
    constants: dict[str, int]
    change: str


def candidates_of(kernels: str, constants: dict[str, int]) -> list[Candidate]:
    """Return the present constants, and those with one of them halved or doubled."""
    found = [Candidate(kernels, constants, "")]
    for name, value in constants.items():
        for other in (value // 2, 2 * value):
            if other:
                found.append(Candidate(kernels, constants | {name: other}, f"{name} {value} -> {other}"))
    return found


def run_worker(candidate: Candidate, folder: Path, mode: str, rehearse: bool, timeout: float) -> dict[str, Any]:
    """Run the operators of a candidate in a process of their own, and return their seconds, or an error."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", mode, "--folder", str(folder)]
    command += ["--kernels", candidate.kernels, "--constants", json.dumps(candidate.constants)]
    try:
        done = subprocess.run(
            [*command, *(["--rehearse"] if rehearse else [])], capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return {"error": NO_TIME}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def work(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the operators of one candidate. `expect` stores the results, `compare` compares with them, `time` times."""
    (kernels,) = arguments.kernels
    if arguments.rehearse:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    from depthlm.ops import tiles

    # before the modules of the kernels are imported
    tiles.TILES[tiles.architecture()][kernels] = json.loads(arguments.constants)
    import torch

    from benchmarks.shared.interleaved import gpu_kernels, measure
    from benchmarks.shared.operators import CASES, Make, Shape, difference, shape_of, step

    device, dtype = ("cpu", torch.float32) if arguments.rehearse else ("cuda", torch.bfloat16)
    shape = Shape(1, 2, 16, 2, 2, 1, 8, 2) if arguments.rehearse else shape_of("1.5b", BATCH, LENGTH)
    seconds = 0.0
    for name in OPERATORS[kernels]:
        case = CASES[name](shape, Make(torch.Generator(device).manual_seed(0), dtype))
        turn = step(case.run, case.inputs, "triton")
        outputs, stored = turn(), arguments.folder / f"{kernels}-{name}.pt"
        if arguments.worker == "expect":
            torch.save([x.detach() for x in outputs], stored)
        elif arguments.worker == "compare":
            differs = difference(outputs, torch.load(stored, map_location=device))
            if not differs <= TOLERANCE:
                raise SystemExit(f"{name}: results differ by {differs:.1e}")
        else:
            del outputs
            # all kernels, since more programs leave more partial sums to PyTorch; without the host, which may be slower
            profiled = [gpu["gpu_seconds"] for _ in range(ROUNDS) if (gpu := gpu_kernels(turn))]
            seconds += statistics.median(profiled) if profiled else measure({"": turn}, 1, 1)[""][0]
    return {"seconds": seconds}


def tune(
    tiles: Tiles, groups: Iterable[str], deadline: float, rehearse: bool, save: Callable[[list[dict[str, Any]]], object]
) -> list[dict[str, Any]]:
    """Return a line per candidate: its kernels, change, constants, and seconds or an error.

    deadline: on the clock of `time.monotonic`. save: called with the lines after each candidate.
    """
    candidates = [x for kernels in groups for x in candidates_of(kernels, tiles[kernels])]
    lines = [{"kernels": x.kernels, "change": x.change, "constants": x.constants} for x in candidates]

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_processes(rehearse)) as pool:

        def run(candidate: Candidate, mode: str) -> dict[str, Any]:
            left = deadline - time.monotonic()
            return run_worker(candidate, Path(folder), mode, rehearse, left) if left > 0 else {"error": NO_TIME}

        present = [x for x in candidates if not x.change]
        list(pool.map(lambda x: run(x, "expect"), present))
        compared = list(pool.map(lambda x: run(x, "compare"), candidates))
        for candidate, line, result in zip(candidates, lines, compared, strict=True):
            line |= result if "error" in result else run(candidate, "time")
            print(f"{candidate.kernels} {candidate.change or 'as it is'}: {_outcome(line)}", flush=True)
            save(lines)
    return lines


def _processes(rehearse: bool) -> int:
    cores = len(os.sched_getaffinity(0))
    if rehearse:
        return cores
    import torch

    return max(1, min(cores, torch.cuda.get_device_properties(0).total_memory // MEMORY))


def _outcome(line: dict[str, Any]) -> str:
    return f"{1e6 * line['seconds']:,.0f} us" if "seconds" in line else line.get("error", NO_TIME)


def improve(tiles: Tiles, lines: list[dict[str, Any]]) -> Tiles:
    """Return the constants with the fastest candidate of each group that is fast enough."""
    chosen = {kernels: dict(constants) for kernels, constants in tiles.items()}
    for kernels in dict.fromkeys(line["kernels"] for line in lines):
        timed = [line for line in lines if line["kernels"] == kernels and "seconds" in line]
        now = next((line["seconds"] for line in timed if not line["change"]), None)
        best = min(timed, key=lambda line: line["seconds"], default=None)
        if now is not None and best is not None and best["seconds"] < GAIN * now:
            chosen[kernels] = best["constants"]
    return chosen


def replace_table(source: str, table: dict[str, Tiles]) -> str:
    """Return the source of tiles.py with another table."""
    statement = next(x for x in ast.parse(source).body if isinstance(x, ast.AnnAssign))
    lines = source.splitlines(keepends=True)
    text = ["TILES: dict[str, dict[str, dict[str, int]]] = {\n"]
    for architecture, tiles in sorted(table.items()):
        text.append(f"    {json.dumps(architecture)}: {{\n")
        text += [f"        {json.dumps(kernels)}: {json.dumps(tiles[kernels])},\n" for kernels in sorted(tiles)]
        text.append("    },\n")
    return "".join([*lines[: statement.lineno - 1], *text, "}\n", *lines[statement.end_lineno :]])


def markdown(results: reporting.Results) -> str:
    """Return a table of the candidates."""
    rows = []
    for line in results["lines"]:
        same = (x for x in results["lines"] if x["kernels"] == line["kernels"] and not x["change"])
        now = next(same).get("seconds")
        share = f"{line['seconds'] / now:.2f}" if now and "seconds" in line else ""
        rows.append((line["kernels"], line["change"] or "as it is", _outcome(line), share))
    return reporting.headed(results, reporting.table(("kernels", "constants", "time", "of the present"), rows))


def main() -> int:
    parser = reporting.parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="(default: %(default)s)")
    parser.add_argument("--kernels", nargs="+", choices=OPERATORS, default=list(OPERATORS), help="(default: all)")
    parser.add_argument("--dry-run", action="store_true", help="do not write depthlm/ops/tiles.py")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with one constant; writes no tiles")
    parser.add_argument("--worker", choices=("expect", "compare", "time"), help=argparse.SUPPRESS)
    parser.add_argument("--constants", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = reporting.arguments_of(parser, markdown)
    if arguments.worker:
        print(json.dumps(work(arguments)))
        return 0
    import torch

    from depthlm.ops import tiles
    from depthlm.ops.backend import gpu_capability

    if not (arguments.rehearse or torch.cuda.is_available()):
        parser.error("this machine has no GPU; allowed without one: --rehearse")
    (major, minor), present = gpu_capability(), tiles.TILES[tiles.architecture()]
    output = arguments.output or reporting.result_path("tune")
    groups = ["denseformer"] if arguments.rehearse else arguments.kernels
    deadline = time.monotonic() + 60 * arguments.minutes
    lines = tune(
        present, groups, deadline, arguments.rehearse, lambda lines: reporting.write_json(output, {"lines": lines})
    )
    reporting.publish(output, {"lines": lines}, markdown)
    best = improve(present, lines)
    if not (arguments.dry_run or arguments.rehearse) and best != present:
        path = Path(tiles.__file__)
        replace_text(path, replace_table(path.read_text(), tiles.TILES | {f"sm_{major}{minor}": best}))
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
