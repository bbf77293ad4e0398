"""Whether a training step as CUDA graphs is the step without: exactly the same losses, for every preset.

    python benchmarks/rungs/graphs.py --output graphs.json [--processes 5] [--tiny]

A tiny decoder of each preset takes training steps with `training.cuda_graphs=true`, and again with `false`, both with
`deterministic=true`, on another batch in each step. Sublayers are compiled in bf16, and not in fp32. The number of
micro-batches of a step is 1 in one of both dtypes, and 2 in the other one. If losses differ, the steps without graphs
are taken once more, which shows whether these are reproducible at all.
"""

import itertools
import sys
from functools import partial
from typing import Any

import torch

import depthlm
from benchmarks.shared import reporting
from benchmarks.shared.decoders import training_of
from benchmarks.shared.side_by_side import check_lines
from depthlm.config import mechanisms
from depthlm.distributed.process_group import start_distributed
from depthlm.training.setup import start_process

MICRO_BATCH, STEPS = 2, 20
# by precision, whether sublayers are compiled
PRECISIONS = {"bf16": True, "fp32": False}
# there are no graphs on a CPU
GRAPHS = "true" if torch.cuda.is_available() else "auto"


def take_steps(overrides: list[str], graphs: str, steps: int) -> tuple[list[float], Any]:
    """Return the losses of a run, and its graphs."""
    config = depthlm.compose([*overrides, f"training.cuda_graphs={graphs}"])
    device = start_distributed(start_process(config))
    # another compilation for each run: PyTorch keeps few of a function, and then no longer compiles it
    torch._dynamo.reset()
    training = training_of(config, device)
    losses = []
    for _ in range(steps):
        training.batch.copy_(training.batch.roll(1, dims=-1))
        losses.append(training.step())
    return losses, training.graphs


def check_graphs(overrides: list[str], steps: int) -> dict[str, Any]:
    with_graphs, graphs = take_steps(overrides, GRAPHS, steps)
    captured, reason = (0, "the run takes no graphs") if graphs is None else (graphs.captured, graphs.reason)
    # free their memory
    del graphs
    without, _ = take_steps(overrides, "false", steps)
    equal = with_graphs == without and without[-1] < without[0]
    line = {
        "captured": captured,
        "reason": reason,
        "difference": difference(with_graphs, without),
        "first_loss": without[0],
        "last_loss": without[-1],
        "passed": equal,
    }
    if not equal:
        line["difference_without_graphs"] = difference(take_steps(overrides, "false", steps)[0], without)
        line |= {"losses": with_graphs, "losses_without_graphs": without}
    return line


def difference(a: list[float], b: list[float]) -> float:
    """Return the largest difference of losses; NaN if one is not a number."""
    # torch's max propagates a NaN, Python's max ignores it
    return (torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64)).abs().max().item()


def markdown(results: reporting.Results) -> str:
    """Return how many lines are equal, and a table of the others. graphs: how many were captured, or why none was."""
    rows = []
    for line in results["lines"]:
        if line.get("passed") and line["captured"]:
            continue
        outcome = "equal" if line.get("passed") else line.get("error", "differ")
        graphs = line.get("reason") or str(line.get("captured", ""))
        cells = [reporting.number(line.get("difference"), ".1e"), reporting.number(line.get("last_loss"), ".3f")]
        compiled = "yes" if line["compiled"] else "no"
        words = [str(line["accumulation"]), compiled, graphs, *cells, outcome]
        rows.append([line["name"], line["dtype"], *(word.replace("|", "\\|") for word in words)])
    header = ("preset", "precision", "micro-batches", "compiled", "graphs", "largest difference", "last loss", "")
    equal = sum(bool(line.get("passed")) for line in results["lines"])
    captured = sum(bool(line.get("captured")) for line in results["lines"])
    counts = f"{equal} of {len(results['lines'])} equal, {captured} captured"
    text = reporting.table(header, rows) if rows else "No preset differs."
    return reporting.headed(results, text, f"{results['steps']} steps with and without graphs: {counts}")


def main() -> int:
    parser = reporting.parser_of(__doc__, processes=1)
    parser.add_argument("--tiny", action="store_true", help="a few steps of few presets, for a test on a CPU")
    arguments = reporting.arguments_of(parser, markdown)
    presets, precisions, steps, shape = mechanisms(), list(PRECISIONS), STEPS, []
    if arguments.tiny:
        presets, precisions, steps, shape = ["moda", "mhc"], ["fp32"], 4, ["training.sequence_length=8"]
    jobs = []
    for (d, precision), (p, preset) in itertools.product(enumerate(precisions), enumerate(presets)):
        accumulation = 1 + (d + p) % 2
        overrides = [f"model={preset}", "size=micro", f"precision={precision}", "deterministic=true", "tracker=none",
                     f"training.compile={str(PRECISIONS[precision]).lower()}",
                     f"training.micro_batch_size={MICRO_BATCH}",
                     f"training.batch_size={accumulation * MICRO_BATCH}", *shape]  # fmt: skip
        line = {"name": preset, "dtype": precision, "accumulation": accumulation, "compiled": PRECISIONS[precision]}
        jobs.append((line, partial(check_graphs, overrides, steps)))
    results: reporting.Results = {"steps": steps}
    check_lines(jobs, results, arguments.output, arguments.processes)
    reporting.publish(arguments.output, results, markdown)
    lines = results["lines"]
    nothing = torch.cuda.is_available() and not any(line.get("captured") for line in lines)
    return int(nothing or not all(line.get("passed") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
