"""Derive the values that a configuration leaves open: counts, lengths, precision, vocabulary, run directory."""

import functools
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from depthlm.config.budget import apply_budget
from depthlm.config.renamed import KEYS
from depthlm.config.schema import Config
from depthlm.config.schema.experiment import Experiment
from depthlm.config.schema.keys import keys, on_resume
from depthlm.config.validate.errors import ConfigError
from depthlm.counts import parse_count
from depthlm.data import is_on_hub, padded_vocab_size
from depthlm.machine import environment

# mutually exclusive keys: when the user sets one, the defaults of the others become null
ALTERNATIVES = (
    ("training.max_steps", "training.max_tokens", "training.max_epochs"),
    ("schedule.warmup_ratio", "schedule.warmup_steps"),
)

LENGTHS = ALTERNATIVES[0]


def resolve(config: Config, given: set[str], overrides: Sequence[str], here: bool, saved: bool = False) -> None:
    """Fill in, in place, the values derived from the overrides, the tokenizer and the device.

    given: the keys and groups that the overrides set. here: whether the run is for this machine. saved: whether this is
    the configuration of an existing run, to which the budget is already applied.
    """
    _use_new_keys(config, given)
    for names in ALTERNATIVES:
        named = [name for name in names if name in given and _get(config, name) is not None]
        if len(named) == 1:
            for other in {*names} - {*named}:
                _set(config, other, None)
    for key in keys().values():
        value = _get(config, key.name)
        if key.metadata["count"] and value is not None:
            _set(config, key.name, parse_count(value))
    for source in (*config.data.sources.values(), *config.data.validation.values()):
        for entry in fields(source):
            value = getattr(source, entry.name)
            if entry.metadata["count"] and value is not None:
                setattr(source, entry.name, parse_count(value))
    training = config.training
    if saved and "training.batch_size" in given and "training.batch_tokens" not in given:
        training.batch_tokens = None
    if training.batch_tokens is not None:
        training.batch_size = max(1, training.batch_tokens // training.sequence_length)
    if not saved:
        apply_budget(config, given - keys_of_points(config.experiment.points, overrides))
    if config.precision.name == "auto":
        config.precision.name = environment.fast_precision(environment.device_type(config.device)) if here else "bf16"
    if config.backbone.mlp == "experts":
        config.size.expert_size = config.size.width_of_expert()
    if "size.vocab_size" not in given and tokenizer_exists(config):
        config.size.vocab_size = max(config.size.vocab_size, padded_vocab_size(config.data))
    if "model.name" not in given:
        config.model.name = mechanism_name(config.model.name, overrides)
    if config.output_dir is None:
        config.output_dir = run_directory(overrides)
    # the other points of the experiment are not settings of this run
    config.experiment = Experiment(name=config.experiment.name if saved else experiment_of(overrides) or "")


def keys_of_points(points: Sequence[Any], overrides: Sequence[str]) -> set[str]:
    """Return the keys whose override equals a value in the experiment's points, so that it is not the user's choice."""
    texts = by_name(overrides)
    theirs = [(key, value) for line in points if isinstance(line, dict) for key, value in line.items()]
    return {
        key
        for key, value in theirs
        if key in texts and any(texts[key] == str(v) for v in (value if isinstance(value, list) else [value]))
    }


def by_name(overrides: Sequence[str]) -> dict[str, str]:
    """Return the text that each key or group is set to; the last override of a key wins."""
    return dict(text.lstrip("+").partition("=")[::2] for text in overrides)


def run_directory(overrides: Sequence[str]) -> str:
    """Return the default run directory, for a run without output_dir."""
    return str(Path("outputs", experiment_of(overrides) or "default", run_name(overrides)))


def run_name(overrides: Sequence[str]) -> str:
    """Return a folder name made from the sorted overrides that affect the result; `base` if there are none."""
    parts = [f"{name}-{value}" for name, value in sorted(by_name(overrides).items()) if on_resume(name) != "free"]
    return folder_name("__".join(parts) or "base")


def folder_name(text: str) -> str:
    """Return a text as a folder name, with unsafe characters replaced and its length limited."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:120]
    if plain == text:
        return text
    # without the hash, two different texts could give the same name
    return f"{plain}-{hashlib.sha256(os.fsencode(text)).hexdigest()[:8]}"


def mechanism_name(preset: str, overrides: Sequence[str]) -> str:
    """Return the name of a mechanism: `mhc+depth_attention`, or `dca,connection=mhc` for a modified preset."""
    given = dict(override.split("=", 1) for override in overrides if override.startswith(("model/", "+model/")))
    parts = {name.rpartition("/")[2]: value for name, value in given.items()}
    if preset != "vanilla":
        return ",".join([preset, *(f"{part}={value}" for part, value in parts.items())])
    return "+".join(value for value in parts.values() if value not in ("residual", "self_attention")) or preset


def experiment_of(overrides: Sequence[str]) -> str | None:
    """Return the experiment given in the overrides, or None."""
    names = [o.partition("=")[2] for o in overrides if o.partition("=")[0].lstrip("+") == "experiment"]
    return names[-1] if names and names[-1] != "null" else None


def tokenizer_exists(config: Config) -> bool:
    """Return whether data.tokenizer is bpe, bytes, an existing file, or a model of the hub."""
    name = config.data.tokenizer
    return name in ("bpe", "bytes") or Path(name).is_file() or is_on_hub(name)


def _use_new_keys(config: Config, given: set[str]) -> None:
    """Move, in place, the value of each old key to its new one. Raises ConfigError if both are given."""
    for old, new in KEYS.items():
        value = _get(config, old)
        if value is not None:
            if {old, new} <= given:
                raise ConfigError([f"{old}: the old name of {new}, which is given too; leave out {old}"])
            _set(config, new, value)
            _set(config, old, None)


def _get(config: Config, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), config)


def _set(config: Config, name: str, value: object) -> None:
    *path, leaf = name.split(".")
    setattr(functools.reduce(getattr, path, config), leaf, value)
