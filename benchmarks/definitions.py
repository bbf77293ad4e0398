"""How much faster each operator is than its definition on this CPU: `cpu.py` against `naive.py`, interleaved.

    python benchmarks/definitions.py [--size 360m] [--batch 1] [--length 512] [--rounds 7] [--output results/...json]

Forward and backward in fp32, with the inputs of operators.py.
"""

import argparse
import sys
from pathlib import Path

import torch
from interleaved import measure, ratio, result_path, write_json
from operators import CASES, Make, difference, shape_of, step
from rich.console import Console
from rich.table import Table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="360m", help="the option of conf/size whose shapes are used")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=result_path("definitions"))
    arguments = parser.parse_args()
    shape, lines = shape_of(arguments.size, arguments.batch, arguments.length), {}
    table = Table("operator", "times as fast", "ms", "ms of the definition", "difference")
    for name, make_case in CASES.items():
        case = make_case(shape, Make(torch.Generator().manual_seed(0), torch.float32))
        steps = {kernels: step(case.run, case.inputs, kernels) for kernels in ("torch", "naive")}
        different = difference(*(turn() for turn in steps.values()))
        seconds = measure(steps, arguments.rounds, steps=2)
        lines[name] = {"times_as_fast": ratio(seconds, "torch", "naive"), "difference": different, "seconds": seconds}
        table.add_row(
            name,
            f"{lines[name]['times_as_fast']:.2f}",
            *(f"{1e3 * min(seconds[kernels]):.1f}" for kernels in ("torch", "naive")),
            f"{different:.0e}",
        )
    Console().print(table)
    write_json(arguments.output, {"shape": shape._asdict(), "operators": lines})
    return 0


if __name__ == "__main__":
    sys.exit(main())
