"""Add the complete runs of the study to its committed records.

    python benchmarks/study/collect.py

Runs that are recorded already stay as they are, also where their directories are gone.
"""

import json
from pathlib import Path
from typing import Any

from archive import EXPERIMENTS, binned, decisive_settings, lines_of, write_lines

from depthlm.config.saved import load_config
from depthlm.run_directory import RunDirectory
from depthlm.runs.records import COMPLETE, read_run
from depthlm.sweeps.points import Point, sweep_points

NUMBERS = ("parameters", "steps", "tokens", "training_loss", "validation_loss", "validation_perplexity",
           "forward_flops_per_token", "training_flops", "skipped")  # fmt: skip


def main() -> None:
    for experiment in EXPERIMENTS:
        lines = lines_of(experiment)
        points = sweep_points([f"experiment=depthlm/{experiment}"])
        for point in points:
            name = Path(point.directory).name
            if name not in lines and (line := record(point)) is not None:
                lines[name] = line
        write_lines(experiment, [lines[name] for point in points if (name := Path(point.directory).name) in lines])
        print(f"{experiment}: {len(lines)} of {len(points)} runs")


def record(point: Point) -> dict[str, Any] | None:
    """Return the line of a run, or None if it is not complete."""
    run = read_run(point.directory)
    if run.state != COMPLETE:
        return None
    environment = json.loads(RunDirectory(run.directory).environment.read_text())
    return {
        "run": run.directory.name,
        "settings": decisive_settings(load_config(run.directory)),
        "summary": {name: run.summary[name] for name in NUMBERS},
        "environment": place(environment) | {key: environment["git"][key] for key in ("commit", "changed")},
        "losses": binned(run.rows),
    }


def place(environment: dict[str, Any]) -> dict[str, str]:
    """Return what decides the last digits of a loss: the versions of Python and torch, and the processor."""
    python, torch = environment["python"], environment["versions"]["torch"]
    return {"python": python, "torch": torch, "device": environment["device"]}


if __name__ == "__main__":
    main()
