"""Our operators beside those of Liger-Kernel, flash-linear-attention (fla) and MoDA's authors, on the same inputs.

    python benchmarks/peers.py [--output results/peers.json]     # launches, bytes and machine code for sm_90; no GPU
    python benchmarks/peers.py --check                           # outputs and gradients, in Triton's interpreter
    python benchmarks/peers.py --time                            # times on a GPU; with --tiny in the interpreter
    python benchmarks/peers.py --markdown results/peers.json

The peers are not dependencies of this repository: pip install --no-deps liger-kernel fla-core einops
MoDA's authors have a fork of fla, in libs/moda_triton of github.com/hustvl/MoDA, so install either of them.
"""

import importlib.metadata
import importlib.util
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import rehearsal
from benchmarks.shared.reporting import Results, arguments_of, error_text, parser_of, result_path, table, write_json

# batch and tokens of a micro-batch, and hidden sizes
SHAPE, SIZES = (8, 2048), {"1.5b": 1536, "3b": 2048}
TINY_SHAPE, TINY_SIZES = (1, 3), {"tiny": 16}
# the modules and the packages of the peers
PEERS = {
    "liger": ("liger_kernel", "liger-kernel"),
    "fla": ("fla.ops.attnres", "fla-core"),
    "moda": ("fla.ops.moda", "flash-linear-attention"),
}
# the allowed difference, relative to the largest value of a tensor; the operators compute in fp32
TOLERANCE = 1e-4

# in the order in which times and results are compared: Liger's reads and those of fla compile for long
CHEAPEST_FIRST = ("mhc", "moda", "attention_residuals")

Line = dict[str, Any]


def static(peers: list[str]) -> list[Line]:
    """Return launches, bytes and machine code of a forward and backward pass of each operator."""
    # before torch starts
    rehearsal.prepare()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from benchmarks.fake_gpu.step import measure_traffic
    from benchmarks.shared.peer_operators import OPERATORS
    from depthlm.ops.backend import using

    def make(*shape: int, scale: float = 1.0, dtype: Any = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True)

    lines = []
    for operator, case_of in OPERATORS.items():
        for size, width in SIZES.items():
            with FakeTensorMode(allow_non_fake_inputs=True), using("triton"), without_addresses(peers):
                # new tensors for each, which have no gradients yet
                cases = {name: case_of(make, *SHAPE, width) for name in ("ours", *peers)}
                if not cases["ours"].runs.keys() & {*peers}:
                    continue
                measured = {
                    name: measure_traffic(x.runs[name], x.inputs) for name, x in cases.items() if name in x.runs
                }
            for name, traffic in measured.items():
                kernels = [{"kernel": x.kernel, "launches": n, **x.inspect()} for x, n in traffic.kernels.items()]
                moved, saved = traffic.moved / 1e9, traffic.saved / 1e6
                line = {"launches": traffic.launches, "moved_gb": moved, "saved_mb": saved, "kernels": kernels}
                lines.append({"operator": operator, "size": size, "by": name, **line})
    return lines


def compare(peers: list[str], check: bool, interpreted: bool) -> Iterator[Line]:
    """Yield the differences of the peers' tensors from ours, or the times, for each operator and size."""
    if interpreted:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    # Triton reads these variables when it is imported
    import torch

    from benchmarks.shared.interleaved import measure, ratio, release
    from benchmarks.shared.operators import Make, difference, step
    from benchmarks.shared.peer_operators import OPERATORS

    device, dtype = ("cpu", torch.float32) if interpreted else ("cuda", torch.bfloat16)
    make = Make(torch.Generator(device).manual_seed(0), dtype).normal
    shape, sizes = (TINY_SHAPE, TINY_SIZES) if interpreted else (SHAPE, SIZES)
    for (size, width), operator in itertools.product(sizes.items(), CHEAPEST_FIRST):
        case = OPERATORS[operator](make, *shape, width)
        runs = case.runs | (case.interpreted if interpreted else {})
        if not runs.keys() & {*peers}:
            continue
        line: Line = {"operator": operator, "size": size}
        steps, results, compiling = {}, {}, {}
        for name in ("ours", *peers):
            if name in runs:
                started = time.perf_counter()
                try:
                    steps[name] = step(runs[name], case.inputs, "triton")
                    results[name] = steps[name]()
                except Exception as error:
                    # the other contenders may succeed
                    steps.pop(name, None)
                    yield {**line, "by": name, "error": error_text(error)}
                compiling[name] = time.perf_counter() - started
                print(f"{operator}, {size}, {name}: {compiling[name]:.1f} s to the first result", flush=True)
        if "ours" not in steps:
            continue
        ours = results.pop("ours")
        if check:
            for name, theirs in results.items():
                largest = difference(theirs, ours)
                yield {**line, "by": name, "difference": largest, "passed": largest < TOLERANCE}
        else:
            del ours, results
            for name, seconds in (times := measure(steps, rounds=5, steps=1, warmup=1)).items():
                yield {
                    **line,
                    "by": name,
                    "milliseconds": 1e3 * statistics.median(seconds),
                    "ours_is_faster_by": ratio(times, "ours", name),
                    "first_seconds": compiling[name],
                }
        del case, runs, steps
        release()


def is_installed(module: str) -> bool:
    """Return whether a module exists, without importing the packages that contain it."""
    top, *inside = module.split(".")
    spec = importlib.util.find_spec(top)
    folders = (spec.submodule_search_locations or []) if spec else []
    return any(Path(folder, *inside).exists() for folder in folders)


@contextmanager
def without_addresses(peers: list[str]) -> Iterator[None]:
    """Let fla's operator run on tensors that have no address, whose alignment it would check."""
    if "fla" not in peers:
        yield
        return
    from fla.ops.attnres import fused

    def padded(tensors: Any) -> tuple[Any, ...]:
        return (*tensors, *tensors[:1] * (max(8, fused.triton.next_power_of_2(len(tensors))) - len(tensors)))

    with mock.patch.object(fused, "_build_ptr_table", padded):
        yield


def markdown(results: Results) -> str:
    header, rows = ["operator", "size", "by"], []
    for line in results["lines"]:
        by = line["by"] if line["by"] == "ours" else f"{line['by']} {results['peers'][line['by']]}"
        cells = [line["operator"], line["size"], by]
        if "error" in line:
            cells += ["error", *[""] * (len(header) - 4)]
        elif "kernels" in line:
            header[3:] = ["launches", "GB moved", "MB saved", "registers", "stack", "blocks/SM"]
            code = [[kernel[key] for kernel in line["kernels"]] for key in ("registers", "stack", "blocks_per_sm")]
            most = [str(pick(values)) for pick, values in zip((max, max, min), code, strict=True)]
            cells += [f"{line['launches']:,}", f"{line['moved_gb']:.1f}", f"{line['saved_mb']:,.0f}", *most]
        elif "milliseconds" in line:
            header[3:] = ["ms", "ours is faster by"]
            cells += [f"{line['milliseconds']:.2f}", f"{line['ours_is_faster_by']:.2f}"]
        else:
            header[3:] = ["difference"]
            cells.append(f"{line['difference']:.1e}")
        rows.append(cells)
    return table(header, rows)


def main() -> int:
    parser = parser_of(__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--check", action="store_true", help="compare results in Triton's interpreter")
    which.add_argument("--time", action="store_true", help="compare times on a GPU")
    parser.add_argument("--tiny", action="store_true", help="with --time: tiny shapes in the interpreter")
    arguments = arguments_of(parser, markdown)
    if arguments.tiny and not arguments.time:
        parser.error("--tiny is an option of --time")
    peers = [name for name, (module, _) in PEERS.items() if is_installed(module)]
    if not peers:
        parser.error("no peer is installed: pip install --no-deps liger-kernel fla-core einops")
    if arguments.check or arguments.time:
        measured = compare(peers, arguments.check, interpreted=arguments.check or arguments.tiny)
    else:
        # the kernels of MoDA's authors choose their tiles by the name of the GPU
        measured = iter(static([name for name in peers if name != "moda"]))
    lines: list[Line] = []
    results: Results = {"peers": {name: importlib.metadata.version(PEERS[name][1]) for name in peers}, "lines": lines}
    output = arguments.output
    for line in measured:
        lines.append(line)
        # only now torch has started, with the device that it is to see
        output = output or result_path("peers")
        write_json(output, results)
    print(markdown(results))
    print(f"written to {output}")
    return int(not all(line.get("passed", "error" not in line) for line in lines))


if __name__ == "__main__":
    sys.exit(main())
