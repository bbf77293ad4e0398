"""Experiments and run directories, complete or not, with made-up numbers, in the current folder."""

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from depthlm.config import Config, compose
from depthlm.config.experiment import Column, Experiment
from depthlm.config.keys import flatten, on_resume, override_text
from depthlm.report.experiment_report import experiment_report
from depthlm.report.rows import gather
from depthlm.report.sweep import LOSS, Sweep, with_derived
from depthlm.sweeps.point import Point
from depthlm.sweeps.points import expand

STEPS, SECONDS = 40, 98.7


def experiment(**settings: Any) -> Experiment:
    """Return an experiment with these fields; columns as in a file."""
    columns = {name: Column(**column) for name, column in settings.pop("columns", {}).items()}
    return Experiment(name="made_up", columns=columns, **settings)


def points(of: Experiment, budget: str = "paper", seeds: Sequence[str] = ()) -> list[Point]:
    """Return the points of an experiment, one for each seed."""
    variants = [{"budget": budget, **({"seed": seed} if seed else {})} for seed in seeds or [""]]
    return [
        Point(
            [f"{name}={value}" for name, value in (chosen | point.settings).items()],
            point.settings | chosen,
            point.parts,
            point.paper,
            spreads=point.spreads,
        )
        for chosen in variants
        for point in expand(of)
    ]


def directories(of: Experiment, budget: str = "paper", seeds: Sequence[str] = ()) -> list[str]:
    """Return the run directory of each point."""
    return [point.directory for point in points(of, budget, seeds)]


def sweep(of: Experiment, budget: str = "paper", seeds: Sequence[str] = ()) -> Sweep:
    """Return the sweep with the content of its run directories; the configurations are the default ones."""
    rows = gather(points(of, budget, seeds))
    return with_derived(Sweep(of, rows, of.columns or LOSS, [default_config(budget)] * len(rows), []))


def reported(of: Experiment, budget: str = "paper", seeds: Sequence[str] = ()) -> str:
    """Return the report of a sweep; its figures are in `report`."""
    Path("report").mkdir(exist_ok=True)
    return experiment_report(sweep(of, budget, seeds), Path("report"))[0]


@functools.cache
def default_config(budget: str) -> Config:
    return compose([f"budget={budget}"], here=False)


def write_run(
    directory: str | Path,
    loss: float = 3.0,
    *,
    done: float = 1.0,
    failure: str | None = None,
    config: dict[str, Any] | None = None,
    **summary: Any,
) -> Path:
    """Write a run whose losses fall to `loss`. done: the share of its steps that is done; 1: complete."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    speed = summary.setdefault("tokens_per_second", 12345.0)
    for step in range(1, round(done * STEPS) + 1):
        now = loss + 2.5 * math.exp(-9 * step / STEPS)
        noisy = now + 0.02 * math.sin(step * step)
        row: dict[str, Any] = {"step": step, "tokens": step * 1000, "loss": noisy, "mean_loss": noisy}
        row["tokens_per_second"] = speed
        if step % (STEPS // 4) == 0:
            row |= {"validation/set/loss": now, "wall_seconds": SECONDS * step / STEPS}
        rows.append(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"seed": 1, "model": {"name": "vanilla"}} | (config or {})
    named = {name: override_text(value) for name, value in flatten(settings).items() if on_resume(name) != "free"}
    differences = {name: text for name, text in named.items() if name not in ("seed", "model.name")}
    (folder / "config.yaml").write_text(yaml.safe_dump({"differences": differences} | settings))
    if failure is not None:
        (folder / "failure.json").write_text(json.dumps({"time": "", "error": failure}))
    elif done == 1:
        defaults = {
            "parameters": 1_000_000,
            "steps": STEPS,
            "tokens": STEPS * 1000,
            "training_loss": loss,
            "validation_loss": loss,
            "validation_perplexity": math.exp(loss),
            "training_flops": 1e15,
            "wall_seconds": SECONDS,
        }
        (folder / "summary.json").write_text(json.dumps(defaults | summary))
    return folder


def row(text: str, label: str, nth: int = 0) -> list[str]:
    """Return the cells after the label, from the nth row of a report that begins with this label."""
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    matching = [[cell.strip() for cell in cells[1:]] for cells in lines if cells[0].strip() == label]
    return matching[nth]


def is_png(name: str) -> bool:
    """Return whether the report has this figure and it is a PNG of plausible size."""
    content = Path("report", name).read_bytes()
    return content.startswith(b"\x89PNG") and len(content) > 10_000
