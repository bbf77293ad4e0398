"""The committed records of the runs of docs/results, one JSON Lines file per experiment.

    python docs/results/analysis/archive.py              # adds the complete runs to the records
    python docs/results/analysis/archive.py --missing    # prints the overrides of each run that has no record yet

Runs that are recorded already stay as they are, also where their directories are gone.

A line has the run's directory name, every setting that decides its losses, the numbers of its summary, and where it was
trained. Those of `scaling` also have training losses, each a mean over some steps.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from depthlm.config import Config, compose
from depthlm.config.keys import flatten, on_resume
from depthlm.config.saved import load_config
from depthlm.files import replace_text
from depthlm.report.rows import Row, gather
from depthlm.report.sweep import Sweep, read_sweep
from depthlm.run_directory import RunDirectory
from depthlm.runs.records import COMPLETE, FAILED, WAITING, RunRecord, read_run
from depthlm.sweeps import Point, sweep_points
from depthlm.sweeps.best import has_result

RESULTS = Path(__file__).resolve().parents[1]
ARCHIVE = RESULTS / "runs"
# the speeds measured by benchmarks/mechanisms.py
TIMES = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
# scaling: the first study, with one rate for all
EXPERIMENTS = ("depth", "sizes", "completep", "transfer", "scaling")
# the numbers of a summary that are recorded
NUMBERS = ("parameters", "steps", "tokens", "training_loss", "validation_loss", "validation_perplexity",
           "forward_flops_per_token", "training_flops", "wall_seconds", "skipped")  # fmt: skip
# names and defaults of other keys, which decide no loss themselves
IGNORED = ("size.lr", "size.name", "size.sequence_length", "budget.name")
# the layers, the width, that of the MLP, and the mechanism
Model = tuple[int, int, int, str]


def lines_of(experiment: str) -> dict[str, dict[str, Any]]:
    """Return the lines of an experiment, by the names of their run directories."""
    path = ARCHIVE / f"{experiment}.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    return {line["run"]: line for line in lines}


def write_lines(experiment: str, lines: Sequence[dict[str, Any]]) -> None:
    """Replace the file of an experiment."""
    ARCHIVE.mkdir(exist_ok=True, parents=True)
    replace_text(ARCHIVE / f"{experiment}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def decisive_settings(config: Config) -> dict[str, Any]:
    """Return every setting on which a run's losses depend and that differs from the schema's default."""
    default = flatten(asdict(Config()))
    return {
        name: value
        for name, value in flatten(asdict(config)).items()
        if on_resume(name) == "fixed" and name not in IGNORED and value != default.get(name)
    }


def sweep_of(experiment: str) -> Sweep:
    """Return the sweep of an experiment, with its committed runs, and the times of those whose speed was measured."""
    lines, times = lines_of(experiment), training_times()
    return read_sweep([f"experiment=depthlm/{experiment}"], read=partial(_record, lines, times))


def points_of(experiment: str) -> list[Point]:
    """Return the points of an experiment, as far as its committed runs have chosen them."""
    return sweep_points([f"experiment=depthlm/{experiment}"], read=partial(_record, lines_of(experiment), {}))


def rows_of(experiment: str) -> list[Row]:
    """Return the rows of an experiment, with its committed runs."""
    return gather(points_of(experiment), partial(_record, lines_of(experiment), {}))


def training_times() -> dict[Model, float]:
    """Return the measured seconds per token of each model, on an idle machine."""
    times = {}
    for path in TIMES.glob("study-nano_*.json"):
        speeds = json.loads(path.read_text())
        size = compose(speeds["shape"], here=False).size
        vanilla = 1e-6 * speeds["presets"]["vanilla"]["microseconds_per_token"]
        for name, line in speeds["presets"].items():
            times[size.num_layers, size.hidden_size, size.intermediate_size, name] = vanilla * (1 + line["overhead"])
    return times


def _record(lines: dict[str, Any], times: Mapping[Model, float], name: str) -> RunRecord:
    directory = Path(name)
    line = lines.get(directory.name)
    if line is None:
        return RunRecord(directory, WAITING, [], {}, {}, None)
    if "failure" in line:
        return RunRecord(directory, FAILED, [], {}, {}, line["failure"])
    settings, summary = line["settings"], line["summary"]
    shape = (settings[f"size.{name}"] for name in ("num_layers", "hidden_size", "intermediate_size"))
    model = (*shape, settings["model.name"])
    if model in times:
        summary |= {"training_seconds": summary["tokens"] * times[model]}
    return RunRecord(directory, COMPLETE, [], summary, {}, None)


def _recorded_or_read(lines: dict[str, Any], name: str) -> RunRecord:
    """Return the record of a run from its line, or from its directory if it has none."""
    run = _record(lines, {}, name)
    return read_run(name) if run.state == WAITING else run


def line_of(point: Point) -> dict[str, Any] | None:
    """Return the line of a run, or None if it is not complete, or if its code was not that of a commit.

    A run that diverged has a line with its failure: it decided against the value of a choice, or failed to report it.
    """
    run = read_run(point.directory)
    if not (has_result(point, run) or run.diverged):
        return None
    environment = json.loads(RunDirectory(run.directory).environment.read_text())
    if environment["git"] is None or environment["git"]["changed"]:
        print(f"{run.directory}: not recorded, since the code had changes that were not committed")
        return None
    if run.diverged:
        return {"run": run.directory.name, "failure": run.failure}
    return {
        "run": run.directory.name,
        "settings": decisive_settings(load_config(run.directory)),
        "summary": {name: run.summary[name] for name in NUMBERS},
        "environment": place(environment) | {"commit": environment["git"]["commit"]},
    }


def place(environment: dict[str, Any]) -> dict[str, str]:
    """Return the facts that decide the last digits of a loss: the versions of Python and torch, and the processor."""
    python, torch = environment["python"], environment["versions"]["torch"]
    return {"python": python, "torch": torch, "device": environment["device"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", action="store_true", help="print the runs without a record instead")
    missing = parser.parse_args().missing
    for experiment in EXPERIMENTS:
        lines = lines_of(experiment)
        points = sweep_points([f"experiment=depthlm/{experiment}"], read=partial(_recorded_or_read, lines))
        if missing:
            absent = (point for point in points if Path(point.directory).name not in lines)
            print("".join(f"{' '.join(point.overrides)}\n" for point in absent), end="")
            continue
        for point in points:
            name = Path(point.directory).name
            if name not in lines and (line := line_of(point)) is not None:
                lines[name] = line
        write_lines(experiment, [lines[name] for point in points if (name := Path(point.directory).name) in lines])
        print(f"{experiment}: {len(lines)} of {len(points)} runs")


if __name__ == "__main__":
    main()
