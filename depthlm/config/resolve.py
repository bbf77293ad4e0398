"""Derive the values that a configuration leaves open: counts, lengths, precision, vocabulary, run directory."""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from depthlm.config.errors import ConfigError, listed, nearest
from depthlm.config.experiment import Experiment
from depthlm.config.hydra_context import available_groups, compose_raw, hydra_at_conf
from depthlm.config.keys import check_fields, keys, override_text, replaced, value_of
from depthlm.config.names import (
    Leading,
    by_name,
    earlier_name,
    existing,
    experiment_of,
    mechanism_name,
    normal_value,
    other_settings,
    run_name,
)
from depthlm.config.saved import code_digests, compare
from depthlm.config.schema import Config, run_steps
from depthlm.data import is_on_hub, padded_vocab_size
from depthlm.data.settings import Data
from depthlm.model.shape import Size

LENGTHS = ("training.max_steps", "training.max_tokens", "training.max_epochs")
# mutually exclusive keys: when the user sets one, the defaults of the others become null
ALTERNATIVES = (LENGTHS, ("schedule.warmup_ratio", "schedule.warmup_steps"))
# tokens (bytes) of the standard library to use, and batches of the validation set
OFFLINE_TOKENS, VALIDATION_BATCHES = 2_000_000, 4
WIDTHS = ("hidden_size", "intermediate_size", "expert_size", "head_size", "latent_size", "shared_key_size")
# errors of a composition
COMPOSING = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)
# whether a key may change: the command line sets neither it nor its group
IsFree = Callable[[str], bool]


def resolve(config: Config, given: Set[str], overrides: Sequence[str], config_dir: str | Path | None) -> Config:
    """Return a configuration shrunk to its budget, with the values that follow from the overrides and the tokenizer.

    given: the keys and groups that the overrides set.
    """
    config = shrunk(config, given, overrides)
    values: dict[str, Any] = {"experiment": recorded(config.experiment, experiment_of(overrides))}
    if config.output_dir is None:
        values["output_dir"] = run_directory(overrides, leading(config), config.name, config_dir)
    return with_derived(replaced(config, values), given, overrides)


def recorded(experiment: Experiment, name: str | None) -> Experiment:
    """Return what a run records of its experiment: the name, and which seeds choose between which settings."""
    seeds = experiment.selection_seeds if experiment.best_over else []
    return Experiment(name=name or "", best_over=experiment.best_over, selection_seeds=seeds)


def shrunk(config: Config, given: Set[str], overrides: Sequence[str]) -> Config:
    """Return a configuration shrunk to its budget, with one length, one warm-up and the batch in sequences."""
    config = with_batch_size(with_one_alternative(config, given))
    return with_budget(config, given - keys_of_points(config.experiment, overrides))


def run_directory(
    overrides: Sequence[str], defaults: Leading, name: str | None = None, config_dir: str | Path | None = None
) -> str:
    """Return the run directory of a run without output_dir. name: the value of `name=`.

    defaults: of the experiment.
    """
    folder = Path("outputs", experiment_of(overrides) or "default")
    if name is not None:
        return str(folder / str(name))
    names = run_name(decisive(overrides, config_dir), defaults), run_name(overrides, defaults), earlier_name(overrides)
    return existing(*(folder / name for name in names))


def decisive(overrides: Sequence[str], config_dir: str | Path | None = None) -> list[str]:
    """Return the overrides without those that set what the configuration has without them.

    What the points of an experiment set stays: it distinguishes them.
    """
    kept, settings = list(overrides), other_settings(overrides)
    # a given size of the vocabulary is not raised to that of the tokenizer
    settings.pop("size.vocab_size", None)
    if not settings:
        return kept
    with hydra_at_conf(), suppress(*COMPOSING):
        if experiment := experiment_of(overrides):
            points = compose_raw([f"experiment={experiment}"], config_dir).experiment.points
            varying = {str(name) for line in points for name in line}
            settings = {name: value for name, value in settings.items() if name not in varying}
        usual = _usual(overrides, settings, config_dir)
        whole = _effect(overrides, config_dir) if usual else None
        for name in usual:
            rest = _without(kept, {name})
            with suppress(*COMPOSING):
                effect = _effect(rest, config_dir)
                if whole is not None and effect is not None and not compare(asdict(effect), asdict(whole)):
                    kept = rest
    return kept


def _usual(overrides: Sequence[str], settings: Mapping[str, str], config_dir: str | Path | None) -> list[str]:
    """Return the settings that may be what the configuration has without them; most overrides differ at first sight."""
    single = {name for name in settings if name in keys() or "." in name}
    if not single:
        return list(settings)
    chosen = compose_raw(_without(overrides, single), config_dir)

    def differs(name: str) -> bool:
        values: Any = OmegaConf.select(chosen, name)
        values = OmegaConf.to_container(values, resolve=True) if OmegaConf.is_config(values) else values
        return (name in keys() or values is not None) and normal_value(name, override_text(values)) != settings[name]

    return [name for name in settings if name not in single or not differs(name)]


def _effect(overrides: Sequence[str], config_dir: str | Path | None) -> Config | None:
    config, _ = check_fields(compose_raw(overrides, config_dir))
    given = by_name(overrides).keys()
    return None if config is None else with_base_size(shrunk(config, given, overrides), given, config_dir)


def _without(overrides: Sequence[str], names: Set[str]) -> list[str]:
    return [text for text in overrides if not by_name([text]).keys() & names]


def resolve_saved(config: Config, given: Set[str], overrides: Sequence[str]) -> Config:
    """Return the configuration of an existing run, which was resolved before, with the values of other overrides."""
    config = with_one_alternative(config, given)
    if "training.batch_size" in given and "training.batch_tokens" not in given:
        config = replaced(config, {"training.batch_tokens": None})
    config = replaced(with_batch_size(config), {"experiment": recorded(config.experiment, config.experiment.name)})
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
    """Return the configuration with the width of an expert, the vocabulary, the name of the mechanism and its code."""
    values: dict[str, Any] = {"code": code_digests(config)}
    if config.backbone.mlp == "experts":
        values["size.expert_size"] = config.size.width_of_expert()
    if "size.vocab_size" not in given and tokenizer_exists(config):
        values["size.vocab_size"] = max(config.size.vocab_size, padded_vocab_size(config.data))
    if "model.name" not in given:
        values["model.name"] = mechanism_name(config.model.name, overrides)
    return replaced(config, values)


def with_base_size(config: Config, given: Set[str], config_dir: str | Path | None) -> Config:
    """Return the configuration with the size that parametrization.base_size names, and its rate and initial values.

    A budget shrinks it like the size. Raises ConfigError if there is no such size.

    given: the keys and groups that the overrides set; they stay unchanged.
    """
    name = config.parametrization.base_size
    if not isinstance(name, str):
        return config
    known = available_groups(config_dir)["size"]
    if name not in known:
        raise ConfigError(
            [f"parametrization.base_size={name}: no such size; allowed: {listed(known)}{nearest(name, known)}"]
        )
    with hydra_at_conf():
        composed, _ = check_fields(compose_raw([f"size={name}"], config_dir))
    assert composed is not None
    base = replace(config, size=composed.size)
    base_size = replaced(base, _widths(base)).size
    values: dict[str, Any] = {f"size.{key}": value_of(base_size, key) for key in ("init_std", "embedding_init_std")}
    if config.optimizer.lr == config.size.lr and "size.lr" not in given:
        values["optimizer.lr"] = base_size.lr
    free = {key: value for key, value in values.items() if key not in given}
    return replaced(config, free | {"parametrization.base_size": base_size})


def leading(config: Config) -> Leading:
    """Return what the name of a run with this configuration begins with."""
    return Leading(config.model.name, config.size.name, str(config.seed))


def keys_of_points(experiment: Experiment, overrides: Sequence[str]) -> set[str]:
    """Return the keys whose override is not the user's choice: the points have its value, or it widens their grid."""
    texts = by_name(overrides)
    values = [(key, value) for line in experiment.points if isinstance(line, dict) for key, value in line.items()]
    return {
        key
        for key, value in values
        if key in texts
        and (
            key in experiment.best_over
            or any(texts[key] == str(v) for v in (value if isinstance(value, list) else [value]))
        )
    }


def tokenizer_exists(config: Config) -> bool:
    """Return whether data.tokenizer is bpe, bytes, an existing file, or a model of the hub."""
    name = config.data.tokenizer
    return name in ("bpe", "bytes") or Path(name).is_file() or is_on_hub(name)


def with_budget(config: Config, chosen: Set[str]) -> Config:
    """Return a configuration shrunk to its budget.

    Depth, mechanism and the shape of the schedule do not change: warm-up and validation keep their share of the run.

    chosen: the keys and groups that the command line sets; they stay unchanged, but a size is shrunk to the budget.
    """

    def is_free(name: str) -> bool:
        return not {name, name.rpartition(".")[0]} & (chosen - {"size"})

    budget, before = config.budget, config
    if budget.offline:
        config = _offline(config, chosen, is_free)
    config = _with_free(config, is_free, _widths(config))
    config = _with_free(config, is_free, _batch(config, chosen, is_free))
    if budget.flops is None and budget.max_steps is None:
        return config
    if {*LENGTHS} & chosen:
        warmup = config.schedule.warmup_steps
        if not warmup:
            return config
        # the warm-up of the protocol is meant for the length of the protocol
        shorter = min(warmup, max(1, (run_steps(config) or 0) // 10))
        return _with_free(config, is_free, {"schedule.warmup_steps": shorter})
    steps_before = run_steps(before)
    if steps_before is None:
        return config
    steps = _steps(config, steps_before * before.training.batch_size * before.training.sequence_length)
    return config if steps == steps_before else _cut(config, is_free, steps_before, steps)


def _with_free(config: Config, is_free: IsFree, values: dict[str, Any]) -> Config:
    return replaced(config, {name: value for name, value in values.items() if is_free(name)})


def _offline(config: Config, chosen: Set[str], is_free: IsFree) -> Config:
    if not any(name.split(".")[0] == "data" for name in chosen):
        data = Data(name="stdlib", tokenizer="bytes", on_bad_document="skip", max_tokens=OFFLINE_TOKENS)
        # resolving raises the vocabulary to the size of the tokenizer
        config = _with_free(replace(config, data=data), is_free, {"size.vocab_size": 2})
    # for such narrow models, more threads only add synchronization
    config = _with_free(config, is_free, {"precision.name": "fp32", "training.num_threads": 1})
    unsharded = {"deepspeed.stage": 0, "deepspeed.offload": "none"}
    return replaced(config, unsharded) if is_free("deepspeed.stage") else config


def _widths(config: Config) -> dict[str, int]:
    size, divisor = config.size, config.budget.width_divisor
    widths = {name: value_of(size, name) for name in WIDTHS}
    # enough experts remain for a token to have a choice
    fewest = max(size.num_experts // divisor, 2 * size.experts_per_token)
    unit = math.lcm(config.backbone.router_groups, config.deepspeed.experts)
    return {
        **{f"size.{name}": divided(width, divisor) for name, width in widths.items() if width is not None},
        "size.num_experts": min(size.num_experts, math.ceil(fewest / unit) * unit),
    }


def _batch(config: Config, chosen: Set[str], is_free: IsFree) -> dict[str, int | None]:
    budget, training = config.budget, config.training
    values: dict[str, int | None] = {}
    length, batch_size = training.sequence_length, training.batch_size
    if budget.sequence_length is not None and is_free("training.sequence_length"):
        length = min(length, budget.sequence_length)
        values["training.sequence_length"] = length
    if budget.batch_tokens is not None:
        # that of the protocol is for its batch
        values["training.micro_batch_size"] = None
        if not {"training.batch_size", "training.batch_tokens"} & chosen:
            batch_size = max(1, min(batch_size, budget.batch_tokens // length))
            values |= {"training.batch_tokens": None, "training.batch_size": batch_size}
        most = VALIDATION_BATCHES * batch_size * length
        values["training.validation_tokens"] = min(training.validation_tokens or most, most)
    if budget.micro_batch_tokens is not None:
        values["training.micro_batch_size"] = math.gcd(batch_size, max(1, budget.micro_batch_tokens // length))
    return values


def _steps(config: Config, tokens: int) -> int:
    """Return the steps of a run that had this many tokens before."""
    budget, training = config.budget, config.training
    if budget.flops is not None:
        # one factor for all points, so that their sizes and lengths keep their proportions
        largest = max(config.experiment.flops or 0.0, 6.0 * matrices(config) * tokens)
        tokens = round(tokens * min(1.0, budget.flops / largest))
    steps = max(1, round(tokens / (training.batch_size * training.sequence_length)))
    return min(steps, budget.max_steps or steps)


def _cut(config: Config, is_free: IsFree, before: int, steps: int) -> Config:
    training, schedule = config.training, config.schedule
    values: dict[str, int] = {"training.log_every": max(1, min(training.log_every, steps // 12))}
    if schedule.warmup_steps:
        values["schedule.warmup_steps"] = max(1, round(schedule.warmup_steps * steps / before))
    if training.validate_every is not None:
        # in such a short run, frequent validation would cost more than the training steps
        values["training.validate_every"] = max(1, steps // 4, round(training.validate_every * steps / before))
    config = replaced(config, {"training.max_steps": steps, "training.max_tokens": None})
    return _with_free(config, is_free, values)


def divided(width: int, divisor: int) -> int:
    """Return `width / divisor`, rounded to a multiple of 4 (8 for large widths), at least 4; RoPE needs even widths."""
    if divisor == 1:
        return width
    unit = 8 if width >= 8 * divisor else 4
    return max(4, round(width / divisor / unit) * unit)


def matrices(config: Config) -> int:
    """Return the approximate number N of matrix parameters applied per token, for 6 N FLOPs; each loop counts again."""
    size, backbone, width = config.size, config.backbone, config.size.intermediate_size
    mixers = [_mixer_matrices(name, size) for name in backbone.mixers_of(size.num_layers)]
    dense = size.hidden_size * width * (2 if backbone.mlp == "relu" else 3)
    experts = 3 * size.hidden_size * size.width_of_expert() * (size.experts_per_token + backbone.shared_experts)
    sparse_layers = max(size.num_layers - backbone.dense_layers, 0) if backbone.mlp == "experts" else 0
    mlps = sparse_layers * experts + (size.num_layers - sparse_layers) * dense
    return config.model.loops * (sum(mixers) + mlps) + size.hidden_size * size.vocab_size


def _mixer_matrices(name: str, size: Size) -> int:
    d, h, e = size.hidden_size, size.num_heads, size.head_size
    if name == "attention":
        return d * e * 2 * (h + size.num_kv_heads)
    if name == "delta":
        return 4 * d * h * e + d * h + 2 * (d * e + e * h * e)
    r, s = size.width_of_latent(), size.width_of_shared_key()
    return d * h * (e + s) + d * (r + s) + 2 * r * h * e + d * h * e
