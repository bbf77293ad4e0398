"""A configuration for its readers.

It is given as the protocol in words, the overrides that compose it, and the command that prepares its data.
"""

import shlex
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from depthlm.config.compose import compose_anywhere
from depthlm.config.hydra_context import available_groups, compose_raw, hydra_at_conf, mechanism_option, value_text
from depthlm.config.keys import flatten
from depthlm.config.resolve import LENGTHS
from depthlm.config.saved import compare
from depthlm.config.schema import Config, run_steps
from depthlm.counts import count_text, parse_count
from depthlm.errors import UserError
from depthlm.locations import CONF, command
from depthlm.model.shape import Size
from depthlm.optimizers import Optimizer

# groups whose option has the name in the configuration; the keys of the others are given one by one
GROUPS = ("model", "backbone", "size", "parametrization", "data", "optimizer", "schedule", "precision")
# where files are, and what is applied to the values already
IGNORED = ("data.path", "budget", "experiment", "model.name", "code")
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


def train_overrides(config: Config) -> list[str] | None:
    """Return the shortest overrides that compose a resolved configuration, as words for a shell; None if none do.

    Of an absolute path only the last name is given, since it may be private: /home/me/text becomes /path/to/text.
    """
    found = shortest_overrides(config, public=True)
    return None if found is None else [shlex.quote(text) for text in found]


def shortest_overrides(config: Config, public: bool = False) -> list[str] | None:
    """Return the shortest overrides that compose a resolved configuration; None if none do.

    Keys that do not affect the result are omitted. public: whether to omit the folders of absolute paths.
    """
    options, names = available_groups(None), {group: getattr(config, group).name for group in GROUPS}
    chosen = [f"{group}={name}" for group, name in names.items() if name in options[group]]
    if isinstance(base := config.parametrization.base_size, Size) and base.name in options["size"]:
        chosen.append(f"parametrization.base_size={base.name}")
    if names["model"] not in options["model"]:
        parts = {part: mechanism_option(part, getattr(config.model, part)) for part in ("connection", "attention")}
        chosen += [f"model/{part}={option}" for part, option in parts.items() if option is not None]
    saved = asdict(config)
    values: dict[str, Any] = {}
    try:
        defaults = asdict(compose_anywhere())
        # an option that is the default needs no override, except where it depends on the machine
        is_default = {f"{group}={defaults[group]['name']}" for group in GROUPS if group != "precision"}
        groups = [text for text in chosen if text not in is_default]
        # one value may determine another, as size.lr does optimizer.lr
        for _ in range(3):
            differing = _differences(saved, asdict(compose_anywhere([*groups, *_overrides(values)])))
            if not differing:
                shown = {name: _public(value) for name, value in values.items()} if public else values
                return [*groups, *_overrides(shown)]
            values |= _values(saved, differing)
    except (UserError, HydraException, OmegaConfBaseException, ValueError):
        pass
    return None


def prepare_command(config: Config) -> str:
    """Return the command that prepares `data=<name>`, with every setting that differs from conf/data/<name>.yaml."""
    name = config.data.name
    chosen = [f"data={name}"] if (CONF / "data" / f"{name}.yaml").is_file() else []
    with hydra_at_conf():
        defaults = OmegaConf.to_container(compose_raw(chosen, None).data)
    return " ".join(
        [command("data/prepare.py", "prepare"), *chosen, *_differing("data", asdict(config.data), defaults)]
    )


def _differences(saved: dict[str, Any], composed: dict[str, Any]) -> list[str]:
    return [name for name in compare(saved, composed) if not any(f"{name}.".startswith(f"{part}.") for part in IGNORED)]


def _values(saved: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the values of these keys; a whole group is given by its keys that are set."""
    flat = flatten(saved)
    values: dict[str, Any] = {}
    for name in names:
        inside = {key: value for key, value in flat.items() if key.startswith(f"{name}.") and value is not None}
        values |= inside or {name: flat.get(name)}
    # one length replaces the others, and a batch in tokens the one in sequences
    unset = {name for name in (*LENGTHS, "schedule.warmup_ratio", "schedule.warmup_steps") if values.get(name) is None}
    if values.get("training.batch_tokens") is not None:
        unset.add("training.batch_size")
    return {name: value for name, value in values.items() if name not in unset}


def _overrides(values: dict[str, Any]) -> list[str]:
    return [f"{name}={value_text(name, value)}" for name, value in values.items()]


def _public(value: Any) -> Any:
    is_private = isinstance(value, str) and Path(value).is_absolute()
    return f"/path/to/{Path(value).name}" if is_private else value


def _differing(prefix: str, values: dict[str, Any], defaults: Any) -> list[str]:
    words = [shlex.quote(f"~{prefix}.{key}") for key in defaults or () if key not in values]
    for key, value in values.items():
        default = defaults.get(key) if isinstance(defaults, dict) else None
        if isinstance(value, dict):
            words += _differing(f"{prefix}.{key}", value, default)
        elif f"{prefix}.{key}".removeprefix("data.") not in _UNUSED and not _same(value, default):
            words.append(shlex.quote(f"{prefix}.{key}={value_text(f'{prefix}.{key}', value)}"))
    return words


def _same(value: Any, default: Any) -> bool:
    if isinstance(default, str) and isinstance(value, int):
        return parse_count(default) == value
    return value == default
