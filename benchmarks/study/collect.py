"""Add the complete runs of the study to its committed records.

    python benchmarks/study/collect.py
    python benchmarks/study/collect.py --missing

Runs that are recorded already stay as they are, also where their directories are gone. --missing prints the overrides
of each run that has no record yet, a line each.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from archive import CURVES, EXPERIMENTS, binned, decisive_settings, lines_of, write_lines

from depthlm.config.saved import load_config
from depthlm.run_directory import RunDirectory
from depthlm.runs.records import COMPLETE, read_run
from depthlm.sweeps.points import Point, sweep_points

NUMBERS = ("parameters", "steps", "tokens", "training_loss", "validation_loss", "validation_perplexity",
           "forward_flops_per_token", "training_flops", "skipped")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", action="store_true", help="print the runs without a record instead")
    missing = parser.parse_args().missing
    for experiment in EXPERIMENTS:
        lines = lines_of(experiment)
        points = sweep_points([f"experiment=depthlm/{experiment}"])
        if missing:
            absent = (point for point in points if Path(point.directory).name not in lines)
            print("".join(f"{' '.join(point.overrides)}\n" for point in absent), end="")
            continue
        for point in points:
            name = Path(point.directory).name
            if name not in lines and (line := record(point)) is not None:
                lines[name] = line if experiment in CURVES else {k: v for k, v in line.items() if k != "losses"}
        write_lines(experiment, [lines[name] for point in points if (name := Path(point.directory).name) in lines])
        print(f"{experiment}: {len(lines)} of {len(points)} runs")


def record(point: Point) -> dict[str, Any] | None:
    """Return the line of a run, or None if it is not complete, or if its code was not that of a commit."""
    run = read_run(point.directory)
    if run.state != COMPLETE:
        return None
    environment = json.loads(RunDirectory(run.directory).environment.read_text())
    if environment["git"] is None or environment["git"]["changed"]:
        print(f"{run.directory}: not recorded, since the code had changes that were not committed")
        return None
    return {
        "run": run.directory.name,
        "settings": decisive_settings(load_config(run.directory)),
        "summary": {name: run.summary[name] for name in NUMBERS},
        "environment": place(environment) | {"commit": environment["git"]["commit"]},
        "losses": binned(run.rows),
    }


def place(environment: dict[str, Any]) -> dict[str, str]:
    """Return what decides the last digits of a loss: the versions of Python and torch, and the processor."""
    python, torch = environment["python"], environment["versions"]["torch"]
    return {"python": python, "torch": torch, "device": environment["device"]}


if __name__ == "__main__":
    main()
