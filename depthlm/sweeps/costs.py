"""The cost of a sweep before it runs, for `python -m depthlm summary -m`: a line per point, and the total."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from depthlm.accounting.cost import MEASURED_MFU, count_parameters, flops_per_token, gpu_hours
from depthlm.accounting.overhead import right_columns
from depthlm.build import build_model
from depthlm.config import Config, compose_anywhere, run_steps
from depthlm.console import stdout_console
from depthlm.counts import count_text, format_count
from depthlm.runs.progress import hours_text
from depthlm.sweeps.points import check_points


def print_costs(overrides: Sequence[str], config_dir: str | Path | None, as_json: bool) -> None:
    """Print the parameters, tokens and GPU hours of each point of a sweep, and the total, as a table or as JSON.

    Raises ConfigError.
    """
    points = check_points(overrides, config_dir, compose_anywhere)
    configs = [point.config_elsewhere() for point in points]
    known: dict[str, dict[str, Any]] = {}
    costs = []
    for config in configs:
        # runs that differ in the seed cost the same
        key = json.dumps(asdict(replace(config, seed=0, output_dir=None, name=None)), sort_keys=True)
        if key not in known:
            known[key] = cost_of(config)
        costs.append(known[key])
    if as_json:
        rows = [{"directory": point.directory, **cost} for point, cost in zip(points, costs, strict=True)]
        print(json.dumps(rows, indent=1))
        return
    price = configs[0].price
    names = ["parameters", "steps", "tokens", "FLOPs per token", "GPU hours", *(["cost"] if price is not None else [])]
    table = Table("point", *right_columns(*names), box=box.SIMPLE)
    for point, cost in zip(points, costs, strict=True):
        seed = "" if point.seed is None else f", seed {point.seed}"
        table.add_row(escape(f"{point.label}{seed}"), *_texts(cost, price))
    console = stdout_console()
    console.print(table)
    hours = sum(cost["gpu_hours"] or 0.0 for cost in costs)
    paid = "" if price is None else f", ${hours * price:,.2f} at ${price:,.2f} per GPU hour"
    unknown = sum(cost["gpu_hours"] is None for cost in costs)
    without = f", without {format_count(unknown, 'point')} whose length depends on the corpus" if unknown else ""
    console.print(f"{format_count(len(points), 'point')}: {hours_text(hours)} GPU hours{paid}{without}")
    others = dict.fromkeys(config.model.name for config in configs if config.model.name not in MEASURED_MFU)
    measured = "on H100 GPUs, at the share of their FLOP/s that each mechanism reached on an H200"
    console.print(f"{measured}; at vanilla's: {', '.join(others)}" if others else measured, highlight=False)


def cost_of(config: Config) -> dict[str, Any]:
    """Return the parameters, steps, tokens, FLOPs per token (training) and GPU hours of a run.

    Steps, tokens and hours are None if the length of the run is in epochs.
    """
    model, training, steps = build_model(config, "meta"), config.training, run_steps(config)
    tokens = steps and steps * training.batch_size * training.sequence_length
    flops = flops_per_token(model, training.sequence_length).training
    return {
        "parameters": count_parameters(model)["total"],
        "steps": steps,
        "tokens": tokens,
        "flops_per_token": round(flops),
        "gpu_hours": tokens and gpu_hours(flops * tokens, config.model.name),
    }


def _texts(cost: dict[str, Any], price: float | None) -> list[str]:
    hours = cost["gpu_hours"]
    known = [] if price is None else ["" if hours is None else f"${hours * price:,.2f}"]
    return [
        count_text(cost["parameters"]),
        "" if cost["steps"] is None else f"{cost['steps']:,}",
        "" if cost["tokens"] is None else count_text(cost["tokens"]),
        f"{cost['flops_per_token']:.3g}",
        "" if hours is None else hours_text(hours),
        *known,
    ]
