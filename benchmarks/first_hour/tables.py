"""Fills the part of README.md that a GPU measures, from the JSON of benchmarks/gpu.py.

    python benchmarks/first_hour/tables.py benchmarks/README.md benchmarks/results

The tables stand between `<!-- gpu -->` and `<!-- end -->`. Folders `gpu-*` of the results hold the JSON, one folder per
device. Each rung has a table by the `markdown` of its script.
"""

import importlib
import json
import re
import sys
from pathlib import Path

from benchmarks.gpu import RUNGS
from benchmarks.shared.reporting import Results, number, table
from depthlm.files import replace_text

MARKED = re.compile(r"(<!-- gpu -->\n).*?(<!-- end -->)", re.DOTALL)
NOTHING = "Nothing has been measured on a GPU yet."


def fill(text: str, devices: dict[str, dict[str, Results]]) -> tuple[str, list[str]]:
    """Return the text with its tables, and the errors. devices: by name of the folder, the results of each rung."""
    parts, errors = [], []
    for measured in devices.values():
        parts.append(outcomes(measured))
        for rung in RUNGS:
            results = measured.get(rung.name, {})
            # a rung that failed at once has no results, and the table of outcomes says why
            if "machine" not in results:
                continue
            module = f"benchmarks.{rung.script.removesuffix('.py').replace('/', '.')}"
            try:
                shown = importlib.import_module(module).markdown(results)
            except Exception as error:
                # a table that cannot be made must not cost the others
                errors.append(f"the table of {rung.name}: {type(error).__name__}: {error}")
            else:
                parts.append(f"`{rung.name}`, {rung.question}.\n\n{shown}")
    content = "\n\n".join(part for part in parts if part) or NOTHING
    return MARKED.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text), errors


def outcomes(measured: dict[str, Results]) -> str:
    """Return a table of the rungs of a device that have run."""
    ran = {name: results["rung"] for name, results in measured.items() if "rung" in results}
    if not ran:
        return ""
    device = next((x["machine"]["device"] for x in measured.values() if "machine" in x), "no rung had a result")
    order = [rung.name for rung in RUNGS if rung.name in ran]
    lines = ((name, ran[name]["status"], number(ran[name].get("seconds"), ",.0f")) for name in order)
    return f"{device}:\n\n{table(('rung', 'status', 'seconds'), lines)}"


def read(results: Path) -> dict[str, dict[str, Results]]:
    """Return the results of each device by rung; a broken file counts as missing."""
    devices: dict[str, dict[str, Results]] = {}
    for folder in sorted(results.glob("gpu-*")):
        devices[folder.name] = {}
        for rung in RUNGS:
            try:
                devices[folder.name][rung.name] = json.loads((folder / f"{rung.name}.json").read_text())
            except (OSError, ValueError):
                continue
    return devices


def main(readme: str, results: str) -> int:
    text, errors = fill(Path(readme).read_text(), read(Path(results)))
    replace_text(Path(readme), text)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
