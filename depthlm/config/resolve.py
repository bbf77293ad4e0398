"""Derive the values that a configuration leaves open: counts, lengths, precision, vocabulary, run directory."""

import hashlib
import os
import re
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from depthlm.config.budget import LENGTHS, with_budget
from depthlm.config.experiment import Experiment
from depthlm.config.keys import on_resume, replaced, value_of
from depthlm.config.schema import Config
from depthlm.data import is_on_hub, padded_vocab_size

# mutually exclusive keys: when the user sets one, the defaults of the others become null
ALTERNATIVES = (LENGTHS, ("schedule.warmup_ratio", "schedule.warmup_steps"))


def resolve(config: Config, given: Set[str], overrides: Sequence[str]) -> Config:
    """Return a configuration shrunk to its budget, with the values that follow from the overrides and the tokenizer.

    given: the keys and groups that the overrides set.
    """
    config = with_batch_size(with_one_alternative(config, given))
    config = with_budget(config, given - keys_of_points(config.experiment.points, overrides))
    values: dict[str, Any] = {"experiment": Experiment(name=experiment_of(overrides) or "")}
    if config.output_dir is None:
        values["output_dir"] = run_directory(overrides)
    return with_derived(replaced(config, values), given, overrides)


def resolve_saved(config: Config, given: Set[str], overrides: Sequence[str]) -> Config:
    """Return the configuration of an existing run, which was resolved before, with the values of other overrides."""
    config = with_one_alternative(config, given)
    if "training.batch_size" in given and "training.batch_tokens" not in given:
        config = replaced(config, {"training.batch_tokens": None})
    config = replaced(with_batch_size(config), {"experiment": Experiment(name=config.experiment.name)})
    return with_derived(config, given, overrides)


def with_one_alternative(config: Config, given: Set[str]) -> Config:
    """Return the configuration with only the length and the warm-up that the overrides set, if they set one."""
    for names in ALTERNATIVES:
        named = [name for name in names if name in given and value_of(config, name) is not None]
        if len(named) == 1:
            config = replaced(config, dict.fromkeys({*names} - {*named}))
    return config


def with_batch_size(config: Config) -> Config:
    """Return the configuration with the batch in sequences that follows from a batch in tokens."""
    training = config.training
    if training.batch_tokens is None:
        return config
    return replaced(config, {"training.batch_size": max(1, training.batch_tokens // training.sequence_length)})


def with_derived(config: Config, given: Set[str], overrides: Sequence[str]) -> Config:
    """Return the configuration with the width of an expert, the vocabulary and the name of the mechanism."""
    values: dict[str, Any] = {}
    if config.backbone.mlp == "experts":
        values["size.expert_size"] = config.size.width_of_expert()
    if "size.vocab_size" not in given and tokenizer_exists(config):
        values["size.vocab_size"] = max(config.size.vocab_size, padded_vocab_size(config.data))
    if "model.name" not in given:
        values["model.name"] = mechanism_name(config.model.name, overrides)
    return replaced(config, values)


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
