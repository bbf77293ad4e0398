"""`python -m depthlm summary`: what a configuration costs, before anything is built."""

import json
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from depthlm.analysis.flops import flops_per_token
from depthlm.analysis.memory import estimate_memory
from depthlm.analysis.parameters import count_parameters
from depthlm.build import build_model
from depthlm.config import Config, run_steps


def summarize(config: Config, gpus: int) -> dict[str, Any]:
    """Parameters by part, FLOPs per token, tokens, and bytes on each of `gpus` GPUs for every ZeRO stage.

    The activations are those of one micro-batch; where none is given, of the batch's share of one GPU.
    """
    model = build_model(config, "meta")
    training = config.training
    counts = count_parameters(model)
    flops = flops_per_token(model, training.sequence_length)
    steps = run_steps(config)
    micro_batch_size = training.micro_batch_size or max(1, training.batch_size // gpus)
    memory = {
        f"zero{stage}": estimate_memory(config, counts["total"], stage, gpus, micro_batch_size).total
        for stage in range(4)
    }
    return {
        "model": config.model.name,
        "backbone": config.backbone.name,
        "size": config.size.name,
        "parameters": counts,
        "flops_per_token": round(flops.training),
        "forward_flops_per_token": round(flops.forward),
        "sequence_length": training.sequence_length,
        "steps": steps,
        "tokens": steps * training.batch_size * training.sequence_length,
        "gpus": gpus,
        "precision": config.precision.name,
        "micro_batch_size": micro_batch_size,
        "memory_per_gpu": memory,
    }


def print_summary(config: Config, gpus: int, as_json: bool) -> None:
    """Print the summary of a configuration, as tables or as JSON (bytes, counts)."""
    summary = summarize(config, gpus)
    if as_json:
        print(json.dumps(summary, indent=1))
        return
    console = Console(highlight=False)
    title = f"{summary['model']}, backbone {summary['backbone']}, size {summary['size']}"
    table = Table(title=title, box=box.SIMPLE, title_justify="left", title_style="bold")
    table.add_column("parameters")
    table.add_column("", justify="right")
    table.add_column("share", justify="right")
    total = summary["parameters"]["total"]
    for part, count in summary["parameters"].items():
        if part == "total":
            table.add_section()
        if count:
            table.add_row(part, f"{count:,}", f"{count / total:.1%}")
    console.print(table)
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_row("FLOPs per token, forward", f"{summary['forward_flops_per_token']:.4g}")
    table.add_row("FLOPs per token, training", f"{summary['flops_per_token']:.4g}")
    table.add_row("run", f"{summary['steps']:,} steps, {summary['tokens']:,} tokens")
    table.add_row("run, FLOPs", f"{summary['flops_per_token'] * summary['tokens']:.4g}")
    console.print(table)
    setting = (
        f"{gpus} GPUs, {summary['precision']}, micro-batch {summary['micro_batch_size']} x {summary['sequence_length']}"
    )
    console.print(f"memory per GPU: {setting}")
    table = Table(box=box.SIMPLE, show_header=False)
    for name, size in summary["memory_per_gpu"].items():
        table.add_row(name, f"{size / 2**30:.2f} GiB")
    console.print(table)
