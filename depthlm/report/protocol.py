"""The protocol under which the runs of a sweep train, and whether each run followed it."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from depthlm.config.compose import compose
from depthlm.config.schema import Config
from depthlm.config.schema.keys import flatten, in_protocol
from depthlm.config.schema.length import run_steps
from depthlm.counts import count_text
from depthlm.optimizers import arguments
from depthlm.report.rows import Row
from depthlm.report.tables import Table, cells
from depthlm.runs.records import RunRecord, recorded_settings


def compose_rows(rows: Sequence[Row], config_dir: str | Path | None) -> list[Config]:
    """Return each row's configuration; rows that differ only in the mechanism share one. Raises ConfigError."""
    composed: dict[tuple[str, ...], Config] = {}
    for row in rows:
        if _protocol(row) not in composed:
            composed[_protocol(row)] = compose(row.points[0].checkable(), config_dir, here=False)
    return [composed[_protocol(row)] for row in rows]


def _protocol(row: Row) -> tuple[str, ...]:
    apart = ("model", "init_from", "fork_from")
    return tuple(f"{name}={value}" for name, value in sorted(row.settings.items()) if not name.startswith(apart))


def protocol_table(rows: Sequence[Row], configs: Sequence[Config]) -> Table:
    """Return the protocol as a table; differing values are all listed, with their sizes where these are distinct."""
    lines: dict[str, dict[str, list[str]]] = {}
    for row, config in zip(rows, configs, strict=True):
        for name, text in _texts(config).items():
            size = row.settings.get("size", config.size.name)
            sizes_of_text = lines.setdefault(name, {}).setdefault(text, [])
            if size not in sizes_of_text:
                sizes_of_text.append(size)
    table = []
    for name, texts in lines.items():
        sizes = [size for sizes_of_text in texts.values() for size in sizes_of_text]
        by_size = name != "size" and len(texts) > 1 and len(sizes) == len(set(sizes))
        values = [f"{text} ({', '.join(group)})" if by_size else text for text, group in texts.items()]
        table.append(cells([name, "; ".join(values)]))
    return Table(["protocol", "value"], table, words=True)


def _texts(config: Config) -> dict[str, str]:
    training, optimizer, schedule = config.training, config.optimizer, config.schedule
    steps = run_steps(config)
    batch = training.batch_size * training.sequence_length
    if schedule.warmup_steps is not None:
        warmup = f"{schedule.warmup_steps:,} steps of warm-up"
    else:
        warmup = f"{100 * (schedule.warmup_ratio or 0):.3g}% of the steps as warm-up"
    used, betas = arguments(optimizer), " and ".join(f"{beta:g}" for beta in optimizer.betas)
    floor = "" if schedule.name in ("constant", "inverse_sqrt") else f", down to {schedule.min_lr_ratio:g} of the peak"
    return {
        "size": config.size.name,
        "backbone": config.backbone.name,
        "data": f"{config.data.name}, tokenizer {config.data.tokenizer}",
        "tokens": f"{training.max_epochs} epochs" if steps is None else count_text(steps * batch),
        "steps": f"{training.max_epochs} epochs" if steps is None else f"{steps:,}",
        "batch": f"{training.batch_size:,} sequences of {training.sequence_length:,} = {count_text(batch)} tokens",
        "optimizer": optimizer.name
        + (f", betas {betas}" if "betas" in used else "")
        + f", weight decay {optimizer.weight_decay:g}, gradient clipping {training.gradient_clipping:g}",
        "peak learning rate": f"{optimizer.lr:.4g}",
        "schedule": f"{schedule.name}, {warmup}{floor}",
        "precision": config.precision.name,
        "budget": config.budget.name,
    }


def trained_otherwise(run: RunRecord, config: Config) -> list[str]:
    """Return `key: value in the run, not value in config` for each protocol setting that a run did not train with."""
    saved, expected = recorded_settings(run.directory), flatten(asdict(config))
    return [
        f"{key}: {saved[key]}, not {value}"
        for key, value in expected.items()
        if key in saved and saved[key] != value and in_protocol(key)
    ]
