"""Whether the Triton kernels, and steps as CUDA graphs, are correct on this device.

    python benchmarks/rungs/correctness.py kernels|graphs --output kernels.json [--processes 5] [--tiny]

kernels: each operator of `shared/operators.py` runs forward and backward in Triton, in PyTorch, and in PyTorch in fp64
on the same values; the errors are relative to the largest value of a tensor. Then a tiny decoder of each preset takes
training steps with both, and their losses are compared. A difference is allowed up to a tolerance, or up to twice the
error of PyTorch in the same dtype.

graphs: a tiny decoder of each preset takes training steps with `training.cuda_graphs=true`, and again with `false`,
both with `deterministic=true`, on another batch in each step. The losses must be exactly the same. Sublayers are
compiled in bf16, and not in fp32. The number of micro-batches of a step is 1 in one of both dtypes, and 2 in the other
one. If losses differ, the steps without graphs are taken once more, which shows whether these are reproducible at all.
"""

import itertools
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import depthlm
from benchmarks.shared import reporting
from benchmarks.shared.decoders import training_of
from benchmarks.shared.operators import CASES, Make, Shape, difference, shape_of, step
from benchmarks.shared.side_by_side import Job, check_lines
from depthlm.config import compose, mechanisms
from depthlm.distributed.process_group import start_distributed
from depthlm.machine import environment
from depthlm.training.setup import start_process

# steps of each preset, and where they are tiny
STEPS, TINY_STEPS = 20, 4
MICRO_BATCH = 2
# by precision, whether sublayers are compiled
PRECISIONS = {"bf16": True, "fp32": False}
# there are no graphs on a CPU
GRAPHS = "true" if torch.cuda.is_available() else "auto"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# the allowed difference of losses after some steps, relative to the loss
LOSS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
TINY = Shape(batch=1, length=3, d=16, layers=4, h=4, k=2, e=16, entries=2)


class InDouble(Make):
    """The same values as those of `Make`, in fp64."""

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return Make.normal(self, *shape, scale=scale, dtype=dtype).detach().double().requires_grad_()


def check_operator(name: str, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Return the errors of Triton and of PyTorch against PyTorch in fp64."""
    device = environment.device_type()

    def generator() -> torch.Generator:
        return torch.Generator(device).manual_seed(0)

    case, exact = CASES[name](shape, Make(generator(), dtype)), CASES[name](shape, InDouble(generator(), dtype))
    with torch.no_grad():
        rounded = [y.dtype for y in case.run()]
    expected = step(exact.run, exact.inputs, "torch", rounded)()
    errors = {backend: difference(step(case.run, case.inputs, backend)(), expected) for backend in ("triton", "torch")}
    return {"errors": errors, "passed": errors["triton"] <= max(TOLERANCE[dtype], 2 * errors["torch"])}


def losses(preset: str, kernels: str, dtype: torch.dtype, tokens: int, steps: int) -> Tensor:
    """Return the losses per token of a tiny decoder before and after each step of AdamW."""
    device = environment.device_type()
    config = compose([f"model={preset}", "size=micro", f"kernels={kernels}"], here=False)
    model = depthlm.build_model(config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(config.size.vocab_size, (2, tokens + 1), generator=generator).to(device)
    measured = []
    for taken in range(steps + 1):
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            sums = model(batch[:, :-1], batch[:, 1:])
        loss = sums.nll / sums.tokens
        measured.append(loss.detach())
        if taken < steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return torch.stack(measured).float().cpu()


def check_preset(preset: str, dtype: torch.dtype, tokens: int, steps: int) -> dict[str, Any]:
    fused, plain = (losses(preset, kernels, dtype, tokens, steps) for kernels in ("triton", "torch"))
    # torch's max propagates a NaN, Python's max ignores it
    largest = ((fused - plain).abs() / plain.abs()).max().item()
    return {
        "difference": largest,
        "first_loss": fused[0].item(),
        "last_loss": fused[-1].item(),
        "passed": largest <= LOSS_TOLERANCE[dtype] and bool(fused[-1] < fused[0]),
    }


def kernels_jobs(tiny: bool, steps: int) -> Iterator[Job]:
    """Yield the checks of all operators, then those of all presets."""
    shape, types, tokens = shape_of("1.5b", 1, 256), [torch.bfloat16, torch.float32], 256
    operators, presets = list(CASES), [name for name in mechanisms() if name != "vanilla"]
    if tiny:
        shape, types, tokens = TINY, [torch.float32], 4
        operators, presets = ["depth_value_mix", "merged_attention"], ["moda"]
    for kind, names in (("operator", operators), ("preset", presets)):
        for dtype, name in itertools.product(types, names):
            line = {"kind": kind, "name": name, "dtype": str(dtype).removeprefix("torch.")}
            if kind == "operator":
                yield line, partial(check_operator, name, shape, dtype)
            else:
                yield line, partial(check_preset, name, dtype, tokens, steps)


def kernels_table(results: reporting.Results) -> str:
    """Return a table of the operators, and one of the presets that failed. Errors are relative to a tensor's largest
    value."""
    operators, presets, differences = [], [], []
    for line in results["lines"]:
        outcome = "passed" if line.get("passed") else line.get("error", "failed").replace("|", "\\|")
        if line["kind"] == "operator":
            errors = line.get("errors", {})
            cells = [reporting.number(errors.get(backend), ".1e") for backend in ("triton", "torch")]
            operators.append((line["name"], line["dtype"], *cells, outcome))
        elif line.get("passed"):
            differences.append((line["difference"], line["name"], line["dtype"]))
        else:
            cells = [
                reporting.number(line.get(key), form) for key, form in (("difference", ".1e"), ("last_loss", ".3f"))
            ]
            presets.append((line["name"], line["dtype"], *cells, outcome))
    first = reporting.table(("operator", "dtype", "error of Triton", "error of PyTorch", ""), operators)
    summary = f"{results['steps']} steps of each preset with Triton and with PyTorch: {len(differences)} of "
    summary += f"{len(differences) + len(presets)} passed"
    if differences:
        largest, name, dtype = max(differences)
        summary += f"; the losses differ by at most {largest:.1e} of a loss ({name}, {dtype})"
    header = ("preset", "dtype", "largest difference of losses", "last loss", "")
    second = f"\n\n{reporting.table(header, presets)}" if presets else ""
    return reporting.headed(results, f"{first}\n\n{summary}.{second}")


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
        "difference": largest(with_graphs, without),
        "first_loss": without[0],
        "last_loss": without[-1],
        "passed": equal,
    }
    if not equal:
        line["difference_without_graphs"] = largest(take_steps(overrides, "false", steps)[0], without)
        line |= {"losses": with_graphs, "losses_without_graphs": without}
    return line


def largest(a: list[float], b: list[float]) -> float:
    """Return the largest difference of losses; NaN if one is not a number."""
    # torch's max propagates a NaN, Python's max ignores it
    return (torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64)).abs().max().item()


def graphs_jobs(tiny: bool, steps: int) -> Iterator[Job]:
    """Yield the checks of all presets in all precisions."""
    presets, precisions, shape = mechanisms(), list(PRECISIONS), []
    if tiny:
        presets, precisions, shape = ["moda", "mhc"], ["fp32"], ["training.sequence_length=8"]
    for (d, precision), (p, preset) in itertools.product(enumerate(precisions), enumerate(presets)):
        accumulation = 1 + (d + p) % 2
        overrides = [f"model={preset}", "size=micro", f"precision={precision}", "deterministic=true", "tracker=none",
                     f"training.compile={str(PRECISIONS[precision]).lower()}",
                     f"training.micro_batch_size={MICRO_BATCH}",
                     f"training.batch_size={accumulation * MICRO_BATCH}", *shape]  # fmt: skip
        line = {"name": preset, "dtype": precision, "accumulation": accumulation, "compiled": PRECISIONS[precision]}
        yield line, partial(check_graphs, overrides, steps)


def graphs_table(results: reporting.Results) -> str:
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


def markdown(results: reporting.Results) -> str:
    is_of_kernels = any("kind" in line for line in results["lines"])
    return kernels_table(results) if is_of_kernels else graphs_table(results)


def main() -> int:
    parser = reporting.parser_of(__doc__, processes=1)
    parser.add_argument("subject", nargs="?", choices=("kernels", "graphs"), default="kernels")
    parser.add_argument("--tiny", action="store_true", help="a few tiny cases, for a test on a CPU")
    arguments = reporting.arguments_of(parser, markdown)
    steps = TINY_STEPS if arguments.tiny else STEPS
    jobs = (kernels_jobs if arguments.subject == "kernels" else graphs_jobs)(arguments.tiny, steps)
    results: reporting.Results = {"steps": steps}
    check_lines(jobs, results, arguments.output, arguments.processes)
    reporting.publish(arguments.output, results, markdown)
    lines = results["lines"]
    captured = any(line.get("captured") for line in lines)
    nothing = arguments.subject == "graphs" and torch.cuda.is_available() and not captured
    return int(nothing or not all(line.get("passed") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
