"""Fills the tables of README.md that a GPU measures, from the JSON of benchmarks/gpu.py.

    python benchmarks/first_hour/tables.py benchmarks/README.md benchmarks/results

A table stands between `<!-- gpu: <rung> -->` and `<!-- end -->`; `<!-- gpu: rungs -->` lists all rungs. Folders
`gpu-*` of the results hold the JSON, one folder per device.
"""

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from depthlm.files import replace_text
from first_hour.rungs import RUNGS

Results = dict[str, Any]
MARKED = re.compile(r"(<!-- gpu: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOTHING = "Nothing has been measured on a GPU yet."


def fill(text: str, devices: dict[str, dict[str, Results]]) -> str:
    """Return the text with its tables filled. devices: by name of the folder, the results of each rung."""

    def table(match: re.Match[str]) -> str:
        content = section(match[2], devices)
        return f"{match[1]}{content or NOTHING}\n{match[3]}"

    return MARKED.sub(table, text)


def section(name: str, devices: dict[str, dict[str, Results]]) -> str:
    """Return the tables of a rung, one per device that has results of it."""
    if name == "rungs":
        return "\n\n".join(rungs(measured) for measured in devices.values())
    shown = []
    for measured in devices.values():
        results = measured.get(name, {})
        # a rung that failed at once has no results, and the list of rungs says why
        if "machine" in results:
            shown.append(TABLES[name](results))
    return "\n\n".join(shown)


def rungs(measured: dict[str, Results]) -> str:
    outcomes = {name: results["rung"] for name, results in measured.items() if "rung" in results}
    if not outcomes:
        return ""
    device = next((x["machine"]["device"] for x in measured.values() if "machine" in x), "no rung had a result")
    order = [rung.name for rung in RUNGS if rung.name in outcomes]
    lines = [(name, outcomes[name]["status"], number(outcomes[name].get("seconds"), ",.0f")) for name in order]
    return f"{device}:\n\n{markdown(('rung', 'status', 'seconds'), lines)}"


def markdown(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    columns = list(header)
    rows = [columns, ["---"] * len(columns), *map(list, lines)]
    return "\n".join(f"| {' | '.join(row)} |" if row[0] != "---" else f"|{'|'.join(row)}|" for row in rows)


def number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def headed(results: Results, table: str) -> str:
    machine = results["machine"]
    return f"{machine['device']}, torch {machine['versions']['torch']}:\n\n{table}"


def device(results: Results) -> str:
    versions = results["machine"]["versions"]
    lines = [
        ("device", str(results["name"])),
        ("compute capability", str(results["capability"])),
        ("memory", f"{results['memory_gib']:.1f} GiB"),
        ("driver", str(results["driver"])),
        ("CUDA of torch", str(results["cuda"])),
        ("torch, Triton, DeepSpeed", ", ".join(str(versions[name]) for name in ("torch", "triton", "deepspeed"))),
        ("Python", results["machine"]["python"]),
        ("Triton's kernels", results["triton_missing"] or "can run"),
        ("copies", f"{results['copied_bytes_per_second'] / 1e9:,.0f} GB/s"),
        ("bf16 matrix products", f"{results['bf16_flops_per_second'] / 1e12:,.3g} TFLOP/s"),
    ]
    return markdown(("", ""), lines)


def kernels(results: Results) -> str:
    operators, presets = [], []
    for line in results["lines"]:
        outcome = "passed" if line["passed"] else line.get("error", "failed").replace("|", "\\|")
        if line["kind"] == "operator":
            errors = line.get("errors", {})
            cells = [number(errors.get(kind), ".1e") for kind in ("triton", "torch")]
            operators.append((line["name"], line["dtype"], *cells, outcome))
        else:
            cells = [number(line.get(key), form) for key, form in (("difference", ".1e"), ("last_loss", ".3f"))]
            presets.append((line["name"], line["dtype"], *cells, outcome))
    first = markdown(("operator", "dtype", "error of Triton", "error of PyTorch", ""), operators)
    second = markdown(("preset", "dtype", "largest difference of losses", "last loss", ""), presets)
    return headed(results, f"{first}\n\nAfter {results['steps']} steps:\n\n{second}")


STEP = (
    "preset",
    "size",
    "mode",
    "batch",
    "tokens/s",
    "us/token",
    "MFU",
    "launches",
    "GiB",
    "estimate",
    "first step, s",
)


def steps(results: Results) -> str:
    lines = []
    for line in results["lines"]:
        shape = f"{line['micro_batch_size']} x {line['sequence_length']}"
        values = [
            number(line.get("tokens_per_second"), ",.0f"),
            number(line.get("microseconds_per_token"), ",.1f"),
            number(line.get("mfu"), ".1%"),
            number(line.get("launches"), ","),
            number(line.get("peak_memory_gib"), ".1f"),
            number(line.get("estimated_memory_gib"), ".1f"),
            number(line.get("first_step_seconds"), ".1f"),
        ]
        if "error" in line:
            values[0] = "error"
        lines.append((line["preset"], line["size"], line["mode"], shape, *values))
    return headed(results, markdown(STEP, lines))


def tests(results: Results) -> str:
    counts = ", ".join(f"{results[key]} {key}" for key in ("passed", "failed", "skipped"))
    failures = "".join(f"\n- `{x['test']}`: {x['message']}" for x in results["failures"])
    return headed(results, f"{counts}.{failures and chr(10)}{failures}")


def runs(results: Results) -> str:
    hidden = ("machine", "rung", "loss_scales")
    shown = {key.replace("_", " "): value for key, value in results.items() if key not in hidden}
    if scales := results.get("loss_scales"):
        shown["loss scale"] = f"{scales[0]:g} at first, {scales[-1]:g} at last"
    lines = [(key, f"{value:.5g}" if isinstance(value, float) else str(value)) for key, value in shown.items()]
    return headed(results, markdown(("", ""), lines))


def of_script(name: str) -> Callable[[Results], str]:
    """Return the function that a script has for its own table."""

    def table(results: Results) -> str:
        # each of these scripts imports torch, which takes seconds
        return importlib.import_module(name).markdown(results)

    return table


TABLES: dict[str, Callable[[Results], str]] = {
    "device": device,
    "kernels": kernels,
    "tests": tests,
    "vanilla": steps,
    "mechanisms": of_script("mechanisms"),
    "operators": of_script("kernels"),
    "peers": of_script("peers"),
    "moda": of_script("kernels"),
    "3b": steps,
    "inference": of_script("inference"),
    "fp16": runs,
    "resume": runs,
    "gpu_hour": runs,
}


def read(results: Path) -> dict[str, dict[str, Results]]:
    """Return the results of each device by rung; a broken file counts as missing."""
    devices = {}
    for folder in sorted(results.glob("gpu-*")):
        measured = {}
        for rung in RUNGS:
            try:
                measured[rung.name] = json.loads((folder / f"{rung.name}.json").read_text())
            except (OSError, ValueError):
                continue
        devices[folder.name] = measured
    return devices


def main(readme: str, results: str) -> int:
    devices, failed = read(Path(results)), 0
    text = Path(readme).read_text()
    for name in dict.fromkeys(match[2] for match in MARKED.finditer(text)):
        try:
            section(name, devices)
        except Exception as error:
            # a table that cannot be made must not cost the others
            print(f"error: the table of {name}: {type(error).__name__}: {error}", file=sys.stderr)
            devices = {device: {k: v for k, v in x.items() if k != name} for device, x in devices.items()}
            failed = 1
    replace_text(Path(readme), fill(text, devices))
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
