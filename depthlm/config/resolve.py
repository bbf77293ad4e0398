"""What a configuration leaves to be derived: counts, pairs, precision, vocabulary, run directory."""

import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from depthlm.config.budget import apply_budget
from depthlm.config.schema import Config
from depthlm.config.schema.experiment import Experiment
from depthlm.config.schema.keys import keys
from depthlm.counts import parse_count
from depthlm.data import is_on_hub, padded_vocab_size
from depthlm.machine import environment

# the user gives one of each group, and the default of the others steps back
ALTERNATIVES = (
    ("training.max_steps", "training.max_tokens", "training.max_epochs"),
    ("schedule.warmup_ratio", "schedule.warmup_steps"),
)

LENGTHS = ALTERNATIVES[0]

# what does not change the result of a run: output, logging, checkpoints, stopping, the size of what is sent at once
SILENT = {
    "output_dir", "resume", "memory", "dry_run", "experiment", "tracker", "training.checkpoint_every",
    "training.checkpoint_minutes", "training.keep_last", "training.keep_every", "training.async_checkpoint",
    "training.rank_timeout", "training.stall_timeout", "training.validate_every", "training.log_every",
    "training.log_blocks_every", "training.stop_after", "training.profile", "training.sample", "training.num_threads",
    "data.num_workers", "data.license", "data.text_bytes", "data.num_tokens", "data.download_bytes",
    "deepspeed.reduce_bucket_size", "deepspeed.allgather_bucket_size", "deepspeed.prefetch_bucket_size",
    "deepspeed.overlap_comm",
}  # fmt: skip

# what may differ when a run goes on, and is told: rounding at most, and what to do with bad numbers
CHANGEABLE = {
    "deterministic", "device", "kernels", "deepspeed.stage", "deepspeed.offload", "deepspeed.communication_data_type",
    "training.micro_batch_size", "training.activation_checkpointing", "training.compile", "training.on_bad_numbers",
    "training.max_skipped", "training.on_spike", "training.spike_deviations", "training.spike_window",
}  # fmt: skip


def resolve(config: Config, given: set[str], overrides: Sequence[str], here: bool, saved: bool = False) -> None:
    """Fill in, in place, what follows from the overrides, the tokenizer and the device.

    given: the keys and groups named by the overrides. here: whether it is to run on this machine. saved: whether it is
    the configuration of a run, which a budget has cut already.
    """
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
    if "size.vocab_size" not in given and tokenizer_exists(config):
        config.size.vocab_size = max(config.size.vocab_size, padded_vocab_size(config.data))
    if "model.name" not in given:
        config.model.name = mechanism_name(config.model.name, overrides)
    if config.output_dir is None:
        config.output_dir = run_directory(overrides)
    # what is compared with this run is none of its settings
    config.experiment = Experiment(name=config.experiment.name if saved else experiment_of(overrides) or "")


def keys_of_points(points: Sequence[Any], overrides: Sequence[str]) -> set[str]:
    """The keys that an experiment's points set to the value that the overrides have: no choice of the command line."""
    texts = by_name(overrides)
    theirs = [(key, value) for line in points if isinstance(line, dict) for key, value in line.items()]
    return {
        key
        for key, value in theirs
        if key in texts and any(texts[key] == str(one) for one in (value if isinstance(value, list) else [value]))
    }


def by_name(overrides: Sequence[str]) -> dict[str, str]:
    """What each key or group is set to, as it is spelt; the last one counts."""
    return dict(text.lstrip("+").partition("=")[::2] for text in overrides)


def run_directory(overrides: Sequence[str]) -> str:
    """Where a run goes that does not name its output_dir."""
    return str(Path("outputs", experiment_of(overrides) or "default", run_name(overrides)))


def is_silent(name: str) -> bool:
    """Whether a key (or group) does not change the result of a run."""
    return name in SILENT or name.split(".")[0] in SILENT or name.split(".")[0].split("/")[0] == "hydra"


def run_name(overrides: Sequence[str]) -> str:
    """A folder name made from the overrides that change the result, whatever their order; `base` if there are none."""
    parts = [f"{name}-{value}" for name, value in sorted(by_name(overrides).items()) if not is_silent(name)]
    return folder_name("__".join(parts) or "base")


def folder_name(text: str) -> str:
    """A text as the name of a folder: of few characters, and not too long."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:120]
    if plain == text:
        return text
    # a name that lost characters would clash with another's
    return f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def mechanism_name(preset: str, overrides: Sequence[str]) -> str:
    """`mhc+depth_attention` for a pair; a preset of which a part was replaced says so: `dca,connection=mhc`."""
    given = dict(override.split("=", 1) for override in overrides if override.startswith(("model/", "+model/")))
    parts = {name.rpartition("/")[2]: value for name, value in given.items()}
    if preset != "vanilla":
        return ",".join([preset, *(f"{part}={value}" for part, value in parts.items())])
    return "+".join(value for value in parts.values() if value not in ("residual", "self_attention")) or preset


def experiment_of(overrides: Sequence[str]) -> str | None:
    """The experiment among the overrides, if there is one."""
    names = [o.partition("=")[2] for o in overrides if o.partition("=")[0].lstrip("+") == "experiment"]
    return names[-1] if names and names[-1] != "null" else None


def tokenizer_exists(config: Config) -> bool:
    """Whether data.tokenizer names one of ours, a file that is there, or a model of the hub."""
    name = config.data.tokenizer
    return name in ("bpe", "bytes") or Path(name).is_file() or is_on_hub(name)


def _get(config: Config, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), config)


def _set(config: Config, name: str, value: object) -> None:
    *path, leaf = name.split(".")
    setattr(functools.reduce(getattr, path, config), leaf, value)
