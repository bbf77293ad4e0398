"""The command `python -m depthlm summary`: the cost of a configuration.

The decoders are on the device `meta`, so nothing is allocated. What every mechanism adds to vanilla, or sends in a
pipeline, is in `overhead`.
"""

import json
import re
from dataclasses import asdict, fields
from typing import Any

from rich import box
from rich.table import Table

from depthlm.accounting.cost import (
    assumption,
    connection_flops,
    cost_rows,
    count_parameters,
    flops_per_token,
    gpu_hours,
    layer_flops,
    long_run_remark,
)
from depthlm.accounting.memory import MemoryEstimator, UntracedError, largest
from depthlm.build import build_model
from depthlm.config import Config, run_steps
from depthlm.console import stdout_console
from depthlm.counts import duration_text, gib_text
from depthlm.errors import UserError
from depthlm.model import Decoder
from depthlm.model.parameters import Factors, group_of
from depthlm.optimizers import Groups, Optimizer
from depthlm.optimizers.build import parameter_groups
from depthlm.summary.overhead import overhead, overhead_texts, right_columns

# memory of common GPUs, in GB of 10^9 bytes; CUDA needs what they have beyond that
GPUS = (80, 141)
# values of training.activation_checkpointing that `summary` compares; any n is possible
CHOICES: tuple[bool | int | str, ...] = (False, "selective", 2, True)


def print_summary(config: Config, gpus: int, as_json: bool) -> None:
    """Print the summary of a configuration, as tables or as JSON (bytes, counts)."""
    summary = summarize(config, gpus)
    if as_json:
        print(json.dumps(summary, indent=1))
        return
    console = stdout_console()
    title = f"{summary['model']}, backbone {summary['backbone']}, size {summary['size']}"
    columns = right_columns("", "share")
    table = Table("parameters", *columns, title=title, box=box.SIMPLE, title_justify="left", title_style="bold")
    total = summary["parameters"]["total"]
    for part, count in summary["parameters"].items():
        if part == "total":
            table.add_section()
        if count:
            table.add_row(part, f"{count:,}", f"{count / total:.1%}")
    console.print(table)
    table = Table(
        "optimizer.groups", *right_columns("parameters", "weight decay", "peak learning rate"), box=box.SIMPLE
    )
    for group in summary["optimizer_groups"]:
        table.add_row(
            group["name"], f"{group['parameters']:,}", f"{group['weight_decay']:g}", f"{group['learning_rate']:g}"
        )
    console.print(table)
    if summary["parametrization"]:
        head = right_columns("initial values", "learning rate", "weight decay", "epsilon")
        table = Table(f"parametrization={config.parametrization.name}: factors", *head, box=box.SIMPLE)
        for row in summary["parametrization"]:
            factors = (f"{row[name]:.4g}" for name in Factors._fields)
            table.add_row("\n".join(row["parameters"]), *factors)
        console.print(table)
    table = Table(box=box.SIMPLE, show_header=False)
    # the lengths of documents are known only from their tokens
    whole = ", if a sequence is one document" if config.data.document_mask else ""
    table.add_row(f"FLOPs per token, forward{whole}", f"{summary['forward_flops_per_token']:.4g}")
    table.add_row("FLOPs per token, training", f"{summary['flops_per_token']:.4g}")
    for name, text in overhead_texts(summary["extra"]).items():
        table.add_row(f"added to vanilla, forward: {name}", text)
    if summary["steps"] is not None:
        table.add_row("run", f"{summary['steps']:,} steps, {summary['tokens']:,} tokens")
        if remark := long_run_remark(config):
            table.add_row("remark", remark)
        table.add_row("run, FLOPs", f"{summary['flops_per_token'] * summary['tokens']:.4g}")
        hours = summary["gpu_hours"]
        source = f"({duration_text(3600 * hours / gpus)} on {gpus}) {assumption(config.model.name)}"
        for name, text in cost_rows(hours, source, config.price).items():
            table.add_row(f"run, {name}", text)
    console.print(table)
    if not summary["memory_per_gpu"]:
        console.print("memory per GPU: no estimate in a pipeline; dry_run=true measures it", soft_wrap=True)
        return
    setting = (
        f"{gpus} GPUs, {summary['precision']}, micro-batch {summary['micro_batch_size']} x {summary['sequence_length']}"
    )
    console.print(f"memory per GPU: {setting}")
    names = "memory", *(f"largest micro-batch, {gb} GB" for gb in GPUS)
    table = Table("", *right_columns(*names), box=box.SIMPLE)
    for name, size in summary["memory_per_gpu"].items():
        table.add_row(name, gib_text(size), *_sizes(summary["largest_micro_batch_size"][name]))
    console.print(table)
    console.print(f"by training.activation_checkpointing, at ZeRO {config.deepspeed.stage}")
    table = Table("", *right_columns(*names, "FLOPs computed again"), box=box.SIMPLE)
    for recompute, cost in summary["activation_checkpointing"].items():
        recomputed = cost["recomputed_flops_per_token"] / summary["flops_per_token"]
        sizes = _sizes(cost["largest_micro_batch_size"])
        table.add_row(recompute, gib_text(cost["memory"]), *sizes, f"{recomputed:+.1%}" if recomputed else "none")
    console.print(table)


def summarize(config: Config, gpus: int) -> dict[str, Any]:
    """Return parameters by part, FLOPs per token, tokens, and the memory of each of `gpus` GPUs for every ZeRO stage.

    The activations are those of one micro-batch or, if its size is not configured, of one GPU's share of the batch. The
    summary also has the largest micro-batch for each memory size of GPUS. In a pipeline, memory is not estimated.
    Raises UserError if the decoder cannot be traced, or if the experts cannot be spread over so many GPUs.
    """
    if gpus % config.deepspeed.experts:
        raise UserError(f"deepspeed.experts={config.deepspeed.experts}: must divide --gpus={gpus}")
    model = build_model(config, "meta")
    training = config.training
    counts = count_parameters(model)
    flops = flops_per_token(model, training.sequence_length)
    steps = run_steps(config)
    tokens = steps and steps * training.batch_size * training.sequence_length
    share = max(1, training.batch_size // gpus)
    micro_batch_size = training.micro_batch_size or share
    estimator = MemoryEstimator(config, "cuda", line=(micro_batch_size, 8 * micro_batch_size))

    def per_gpu(stage: int, recompute: bool | int | str) -> tuple[float, dict[str, int | None]]:
        """Return the bytes that a micro-batch needs, and the most sequences that fit a GPU of each size, or None."""

        def total(size: int) -> float:
            return estimator.estimate(stage, gpus, size, max(1, share // size), recompute).total

        return total(micro_batch_size), {f"{gb}GB": largest(range(1, 2**16), gb * 1e9, total) for gb in GPUS}

    # the stages of a pipeline have different layers, and no other sharding
    sharding, recomputing = (range(4), CHOICES) if training.pipeline.stages == 1 else ((), ())
    try:
        stages = {f"zero{stage}": per_gpu(stage, training.activation_checkpointing) for stage in sharding}
        choices = {recompute: per_gpu(config.deepspeed.stage, recompute) for recompute in recomputing}
    except UntracedError as error:
        raise UserError(str(error)) from None
    return {
        "model": config.model.name,
        "backbone": config.backbone.name,
        "size": config.size.name,
        "parameters": counts,
        "optimizer_groups": optimizer_rows(model, config.optimizer),
        "parametrization": factor_rows(model),
        "flops_per_token": round(flops.training),
        "forward_flops_per_token": round(flops.forward),
        "extra": asdict(overhead(model, training.sequence_length)),
        "sequence_length": training.sequence_length,
        "steps": steps,
        "tokens": tokens,
        "gpu_hours": tokens and gpu_hours(flops.training * tokens, config.model.name),
        "gpus": gpus,
        "precision": config.precision.name,
        "micro_batch_size": micro_batch_size,
        "memory_per_gpu": {name: memory for name, (memory, _) in stages.items()},
        "largest_micro_batch_size": {name: sizes for name, (_, sizes) in stages.items()},
        "activation_checkpointing": {
            str(recompute).lower(): {
                "memory": memory,
                "largest_micro_batch_size": sizes,
                "recomputed_flops_per_token": round(recomputed_flops(model, recompute, training.sequence_length)),
            }
            for recompute, (memory, sizes) in choices.items()
        },
    }


def optimizer_rows(model: Decoder, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the number of parameters of each group of `optimizer.groups`, its weight decay and peak learning rate.

    A group has several rows where its parameters differ in these.
    """
    counts: dict[tuple[str, float, float], int] = {}
    for group in parameter_groups(model, optimizer):
        for name, parameter in zip(group["names"], group["params"], strict=True):
            row = group_of(name, group["kind"]), group["weight_decay"], optimizer.lr * group["lr_scale"]
            counts[row] = counts.get(row, 0) + parameter.numel()
    names = [entry.name for entry in fields(Groups)]
    rows = sorted(counts.items(), key=lambda item: (names.index(item[0][0]), -item[1]))
    columns = ("name", "weight_decay", "learning_rate")
    return [dict(zip(columns, row, strict=True)) | {"parameters": count} for row, count in rows]


def factor_rows(model: Decoder) -> list[dict[str, Any]]:
    """Return the factors of a parametrization, and the parameters that have them, with * for the number of a layer.

    Empty for the standard parametrization.
    """
    patterns: dict[Factors, dict[str, None]] = {}
    for name, factors in model.factors.items():
        patterns.setdefault(factors, {})[re.sub(r"\.\d+(?=\.)", ".*", name)] = None
    return [{"parameters": list(names), **factors._asdict()} for factors, names in patterns.items()]


def recomputed_flops(model: Decoder, recompute: bool | int | str, sequence_length: int) -> float:
    """Return the FLOPs per token that the backward pass computes again, besides element-wise operations.

    recompute: a value of training.activation_checkpointing. With selective, only the kernels of the mechanism run
    again; its PyTorch code repeats even less, since its matrix products are stored too.
    """
    if recompute == "selective":
        # linear layers and attention over the sequence are stored
        attentions = sum(layer.attention.forward_flops(0, True) for layer in model.layers)
        return model.loops * attentions + sum(connection.cost.flops for connection in list(model.connections)[:-1])
    num_layers = model.size.num_layers
    positions = range(0, model.loops * num_layers, int(recompute)) if recompute else ()
    layers = sum(sum(layer_flops(model.layers[position % num_layers], sequence_length)) for position in positions)
    return layers + sum(connection_flops(model.connections[2 * p + part]) for p in positions for part in (0, 1))


def _sizes(largest_sizes: dict[str, int | None]) -> list[str]:
    return [str(size or "none") for size in largest_sizes.values()]
