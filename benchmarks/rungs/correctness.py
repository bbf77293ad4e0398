"""Whether the Triton kernels are correct on this device.

    python benchmarks/rungs/correctness.py --output kernels.json [--processes 5] [--tiny]

Each operator of `shared/operators.py` runs forward and backward in Triton, in PyTorch, and in PyTorch in fp64 on the
same values; the errors are relative to the largest value of a tensor. Then a tiny decoder of each preset takes training
steps with both, and their losses are compared. A difference is allowed up to a tolerance, or up to twice the error of
PyTorch in the same dtype.
"""

import itertools
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

import depthlm
from benchmarks.shared import reporting
from benchmarks.shared.operators import CASES, Make, Shape, difference, shape_of, step
from benchmarks.shared.side_by_side import check_lines
from depthlm.config import compose_anywhere, mechanisms
from depthlm.machine import environment

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
    config = compose_anywhere([f"model={preset}", "size=micro", f"kernels={kernels}"])
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


def markdown(results: reporting.Results) -> str:
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


def main() -> int:
    parser = reporting.parser_of(__doc__, processes=1)
    parser.add_argument("--tiny", action="store_true", help="a few tiny cases, for a test on a CPU")
    arguments = reporting.arguments_of(parser, markdown)
    shape, types, tokens, steps = shape_of("1.5b", 1, 256), [torch.bfloat16, torch.float32], 256, 20
    operators, presets = list(CASES), [name for name in mechanisms() if name != "vanilla"]
    if arguments.tiny:
        shape, types, tokens, steps = TINY, [torch.float32], 4, 2
        operators, presets = ["depth_value_mix", "merged_attention"], ["moda"]
    checks: dict[tuple[str, str, torch.dtype], Any] = {}
    for dtype, name in itertools.product(types, operators):
        checks["operator", name, dtype] = partial(check_operator, name, shape, dtype)
    for dtype, name in itertools.product(types, presets):
        checks["preset", name, dtype] = partial(check_preset, name, dtype, tokens, steps)
    jobs = (
        ({"kind": kind, "name": name, "dtype": str(dtype).removeprefix("torch.")}, check)
        for (kind, name, dtype), check in checks.items()
    )
    results: reporting.Results = {"shape": shape._asdict(), "steps": steps}
    check_lines(jobs, results, arguments.output, arguments.processes)
    reporting.publish(arguments.output, results, markdown)
    return int(not all(line.get("passed") for line in results["lines"]))


if __name__ == "__main__":
    sys.exit(main())
