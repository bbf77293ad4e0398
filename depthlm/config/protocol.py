"""A configuration for its readers: the protocol in words, and the command that prepares its data."""

import shlex
from dataclasses import asdict, fields
from typing import Any

from depthlm.config.hydra_context import value_text
from depthlm.config.resolve import compose_fields
from depthlm.config.schema import Config, run_steps
from depthlm.counts import count_text
from depthlm.locations import CONF, command
from depthlm.model.shape import Size
from depthlm.optimizers import Optimizer

# values of data.document_mask
MASKS = {True: "attention inside documents", "bos": "attention inside documents that begin with the end-of-text token"}
# keys that do not affect the preparation
_UNUSED = {"num_workers", "shuffle_seed", "fraction", "document_mask", "max_repetitions", "pad_vocab_multiple"}


def protocol_texts(config: Config) -> dict[str, str]:
    """Return the protocol by name: size, data, length, batch, optimizer, schedule, precision, budget."""
    # it imports torch
    from depthlm.optimizers.build import arguments

    training, optimizer, schedule = config.training, config.optimizer, config.schedule
    longest = training.validation_document_tokens
    scaling, base = config.parametrization, config.parametrization.base_size
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
        "backbone": config.backbone.name
        + (f", dropout {config.backbone.dropout:g}" if config.backbone.dropout else "")
        + (f", initial values {config.backbone.init}" if config.backbone.init != "normal" else "")
        + (f", biases of {config.backbone.bias_init_std:g}" if config.backbone.bias_init_std else ""),
        "data": f"{config.data.name}, tokenizer {config.data.tokenizer}"
        + (f", {MASKS[config.data.document_mask]}" if config.data.document_mask else "")
        + (f", fewer than {most} repetitions of an n-gram" if (most := config.data.max_repetitions) else ""),
        **({"validation": f"one document of up to {longest} tokens per row"} if longest else {}),
        "tokens": f"{training.max_epochs} epochs" if steps is None else count_text(steps * batch),
        "steps": f"{training.max_epochs} epochs" if steps is None else f"{steps:,}",
        "batch": f"{training.batch_size:,} sequences of {training.sequence_length:,} = {count_text(batch)} tokens",
        "optimizer": optimizer.name
        + (f", betas {betas}" if "betas" in used else "")
        + f", weight decay {optimizer.weight_decay:g}{_of_groups(optimizer, 'weight_decay', None)}"
        + f", gradient clipping {training.gradient_clipping:g}",
        "peak learning rate": f"{optimizer.lr:.4g}{_of_groups(optimizer, 'lr_scale', 1.0)}",
        **({"parametrization": f"{scaling.name}, base size {base.name}"} if isinstance(base, Size) else {}),
        "schedule": f"{schedule.name}, {warmup}{floor}",
        "precision": config.precision.name,
        "budget": config.budget.name,
    }


def _of_groups(optimizer: Optimizer, name: str, default: float | None) -> str:
    """Return the groups with another value than the default, as in ` (vector: 0.1)`."""
    values = {entry.name: getattr(getattr(optimizer.groups, entry.name), name) for entry in fields(optimizer.groups)}
    sign = "times " if name == "lr_scale" else ""
    texts = [f"{group}: {sign}{value:g}" for group, value in values.items() if value != default]
    return f" ({', '.join(texts)})" if texts else ""


def prepare_command(config: Config) -> str:
    """Return the command that prepares `data=<name>`, with every setting that differs from conf/data/<name>.yaml."""
    name = config.data.name
    chosen = [f"data={name}"] if (CONF / "data" / f"{name}.yaml").is_file() else []
    composed = compose_fields(chosen, None)
    assert composed is not None
    differing = _list_differing("data", asdict(config.data), asdict(composed.data))
    return " ".join([command("data/prepare.py", "prepare"), *chosen, *differing])


def _list_differing(prefix: str, values: dict[str, Any], defaults: Any) -> list[str]:
    words = [shlex.quote(f"~{prefix}.{key}") for key in defaults or () if key not in values]
    for key, value in values.items():
        default = defaults.get(key) if isinstance(defaults, dict) else None
        if isinstance(value, dict):
            words += _list_differing(f"{prefix}.{key}", value, default)
        elif f"{prefix}.{key}".removeprefix("data.") not in _UNUSED and value != default:
            words.append(shlex.quote(f"{prefix}.{key}={value_text(f'{prefix}.{key}', value)}"))
    return words
