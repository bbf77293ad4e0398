"""Derive the values that a configuration leaves open: counts, lengths, precision, vocabulary, run directory."""

import functools
import math
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from depthlm.config.classes import classes_of, code_digests
from depthlm.config.experiment import Experiment
from depthlm.config.hydra_context import Files, available_groups, compose_raw, hydra_at_conf, state_of_files
from depthlm.config.keys import check_fields, override_text, replace_values, value_at, value_of
from depthlm.config.names import (
    by_name,
    experiment_of,
    given_names,
    importance,
    is_key,
    mechanism_name,
    named_settings,
    named_value,
    run_name,
)
from depthlm.config.saved import compare
from depthlm.config.schema import Config, run_steps
from depthlm.config.validate.explain import explain_overrides
from depthlm.data import is_on_hub, padded_vocab_size
from depthlm.data.settings import Data
from depthlm.errors import ConfigError, join_names, nearest
from depthlm.model.shape import Size

LENGTHS = ("training.max_steps", "training.max_tokens", "training.max_epochs")
# mutually exclusive keys: when the user sets one, the defaults of the others become null
ALTERNATIVES = (LENGTHS, ("schedule.warmup_ratio", "schedule.warmup_steps"))
# tokens (bytes) of the standard library to use, and batches of the validation set
OFFLINE_TOKENS, VALIDATION_BATCHES = 2_000_000, 4
SET_BY_BUDGET = {"precision", "deepspeed"}
WIDTHS = ("hidden_size", "intermediate_size", "expert_size", "head_size", "latent_size", "shared_key_size")
# errors of a composition
COMPOSING = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)
# whether a key may change: the command line sets neither it nor its group
IsFree = Callable[[str], bool]


def resolve(config: Config, overrides: Sequence[str], config_dir: str | Path | None) -> Config:
    """Return a configuration shrunk to its budget, with the values that follow from the overrides and the tokenizer."""
    given = given_names(overrides)
    config = with_base_size(shrink_to_budget(config, given, overrides), given, config_dir)
    values: dict[str, Any] = {
        "experiment": record_experiment(config.experiment, experiment_of(overrides)),
        "differences": find_differences(config, overrides, config_dir),
    }
    config = with_derived(replace_values(config, values), given, overrides)
    if config.output_dir is None:
        folder = Path("outputs", config.experiment.name or "default")
        config = replace(config, output_dir=str(folder / (run_name(config) if config.name is None else config.name)))
    return config


def record_experiment(experiment: Experiment, name: str | None) -> Experiment:
    """Return the part of an experiment that a run records: its name, and which seeds choose between which settings."""
    seeds = experiment.selection_seeds if experiment.best_over else []
    return Experiment(name=name or "", best_over=experiment.best_over, selection_seeds=seeds)


def shrink_to_budget(config: Config, given: Set[str], overrides: Sequence[str]) -> Config:
    """Return a configuration shrunk to its budget, with one length, one warm-up and the batch in sequences."""
    config = with_batch_size(with_one_alternative(config, given))
    return with_budget(config, given - keys_of_points(config.experiment, overrides))


def find_differences(config: Config, overrides: Sequence[str], config_dir: str | Path | None) -> dict[str, str]:
    """Return the settings that a name has after the seed: the fewest of the overrides that compose the configuration.

    Mechanism, size, seed and experiment are always composed, since a name or its folder has them.
    """
    given, values = named_settings(overrides), asdict(config)
    # an alternative that is given replaces it
    given = {name: text for name, text in given.items() if text != "null" or not alternatives(name) & given.keys()}
    files = state_of_files(config_dir)
    options = {name for name in given if not is_key(name)} - (SET_BY_BUDGET if "budget" in given else set())
    # composing an option takes long, so these are compared with those of the experiment alone, which all points share
    own = tuple(text for text in overrides if "experiment" in given_names([text]))
    plain = _compose_from(own, config_dir, files) if options else None
    needed = {name for name in options if plain is None or not _is_same(name, plain, values)}
    guessed: set[str] = set()

    def compose_with(names: Set[str]) -> dict[str, Any] | None:
        rest = [text for text in overrides if all(n in names or n not in given for n in given_names([text]))]
        return _compose_from(tuple(rest), config_dir, files)

    while needed != given.keys():
        composed = compose_with(needed)
        if composed is not None and not compare(composed, values):
            break
        unlike = {name for name in given.keys() - needed if composed is None or not _is_same(name, composed, values)}
        # a budget may have replaced a length
        wanted = unlike or given.keys() & {*LENGTHS} - needed or given.keys() - needed
        # what others follow from comes first
        first = min(map(_rank, wanted))
        chosen = {name for name in wanted if _rank(name) == first}
        needed |= chosen
        guessed |= chosen - unlike
    for name in sorted(guessed):
        composed = compose_with(needed - {name})
        if composed is not None and not compare(composed, values):
            needed.discard(name)
    return {name: named_value(values, name, given[name]) for name in sorted(needed, key=importance)}


def compose_fields(overrides: Sequence[str], config_dir: str | Path | None) -> Config | None:
    """Return the configuration that overrides compose, before what follows from them; None for invalid ones."""
    with hydra_at_conf(), suppress(*COMPOSING):
        return check_fields(compose_raw(overrides, config_dir))[0]
    return None


def mistakes_in(overrides: Sequence[str], config_dir: str | Path | None) -> ConfigError:
    """Return the error with all mistakes in overrides that do not compose."""
    with hydra_at_conf():
        return ConfigError(explain_overrides(overrides, config_dir, compose_raw))


@functools.lru_cache(maxsize=1024)
def _compose_from(overrides: tuple[str, ...], config_dir: str | Path | None, files: Files) -> dict[str, Any] | None:
    """Return the values that overrides compose, before those that follow from the tokenizer; None for invalid ones."""
    config = compose_fields(overrides, config_dir)
    if config is None:
        return None
    names = given_names(overrides)
    return asdict(with_base_size(shrink_to_budget(config, names, overrides), names, config_dir))


def alternatives(name: str) -> set[str]:
    """Return the other keys for a length, or a warm-up, of which a run has one."""
    return {other for names in ALTERNATIVES if name in names for other in names} - {name}


def _is_same(name: str, values: dict[str, Any], others: dict[str, Any]) -> bool:
    """Return whether two configurations have the same value of a key, or the same option of a group."""
    if is_key(name):
        return bool(value_at(values, name) == value_at(others, name))
    names = [value_at(v, f"{name}.name") for v in (values, others)]
    return names[0] == names[1] and (names[0] is not None or value_at(values, name) == value_at(others, name))


def _rank(name: str) -> int:
    """Return the place of a setting among those that others may follow from: a budget, other options, the size."""
    return (
        0 if name == "budget" else 1 if not is_key(name) else 2 if name.startswith(("size.", "parametrization.")) else 3
    )


def resolve_saved(config: Config, saved: Config, overrides: Sequence[str], config_dir: str | Path | None) -> Config:
    """Return the configuration of an existing run, which was resolved before, with the values of other overrides."""
    given, model = given_names(overrides), config.model
    if (saved.model.connection, saved.model.attention) == (model.connection, model.attention):
        # only another mechanism needs a new name
        given |= {"model.name"}
    config = with_one_alternative(config, given)
    if "training.batch_size" in given and "training.batch_tokens" not in given:
        config = replace_values(config, {"training.batch_tokens": None})
    config = with_base_size(with_batch_size(config), given, config_dir)
    config = replace(config, experiment=record_experiment(config.experiment, config.experiment.name))
    return with_derived(config, given, overrides)


def with_one_alternative(config: Config, given: Set[str]) -> Config:
    """Return the configuration with only the length and the warm-up that the overrides set, if they set one."""
    for names in ALTERNATIVES:
        named = [name for name in names if name in given and value_of(config, name) is not None]
        if len(named) == 1:
            config = replace_values(config, dict.fromkeys({*names} - {*named}))
    return config


def with_batch_size(config: Config) -> Config:
    """Return the configuration with the batch in sequences that follows from a batch in tokens."""
    training = config.training
    if training.batch_tokens is None:
        return config
    return replace_values(config, {"training.batch_size": max(1, training.batch_tokens // training.sequence_length)})


def with_derived(config: Config, given: Set[str], overrides: Sequence[str]) -> Config:
    """Return the configuration with the width of an expert, the vocabulary, the name of the mechanism and its code."""
    values: dict[str, Any] = {"code": code_digests(classes_of(config))}
    if config.backbone.mlp == "experts":
        values["size.expert_size"] = config.size.width_of_expert()
    if "size.vocab_size" not in given and tokenizer_exists(config):
        values["size.vocab_size"] = max(config.size.vocab_size, padded_vocab_size(config.data))
    if "model.name" not in given:
        values["model.name"] = mechanism_name(config.model.name, overrides)
    return replace_values(config, values)


def with_base_size(config: Config, given: Set[str], config_dir: str | Path | None) -> Config:
    """Return the configuration with the size that parametrization.base_size names, and its rate and initial values.

    A budget shrinks it like the size. Raises ConfigError if there is no such size, or if its file is invalid.

    given: the keys and groups that the overrides set; they stay unchanged.
    """
    name = config.parametrization.base_size
    if not isinstance(name, str):
        return config
    known = available_groups(config_dir)["size"]
    if name not in known:
        raise ConfigError(
            [f"parametrization.base_size={name}: no such size; allowed: {join_names(known)}{nearest(name, known)}"]
        )
    composed = compose_fields([f"size={name}"], config_dir)
    if composed is None:
        raise mistakes_in([f"size={name}"], config_dir)
    base = replace(config, size=composed.size)
    base_size = replace_values(base, _widths(base)).size
    values: dict[str, Any] = {f"size.{key}": value_of(base_size, key) for key in ("init_std", "embedding_init_std")}
    if config.optimizer.lr == config.size.lr and "size.lr" not in given:
        values["optimizer.lr"] = base_size.lr
    free = {key: value for key, value in values.items() if key not in given}
    return replace_values(config, free | {"parametrization.base_size": base_size})


def keys_of_points(experiment: Experiment, overrides: Sequence[str]) -> set[str]:
    """Return the keys whose override is not the user's choice: the points have its value, or it widens their grid."""
    texts = by_name(overrides)
    lines = (line for line in experiment.points if isinstance(line, dict))
    pairs = ((key, value if isinstance(value, list) else [value]) for line in lines for key, value in line.items())
    known = {(key, override_text(value)) for key, values in pairs for value in values}
    return {key for key, _ in known if key in texts and (key == experiment.best_over or (key, texts[key]) in known)}


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
        # epochs: their number of steps depends on the data
        in_steps = {"training.max_steps": budget.max_steps, "training.max_epochs": None}
        return replace_values(config, in_steps) if budget.max_steps else config
    steps = _steps(config, steps_before * before.training.batch_size * before.training.sequence_length)
    return config if steps == steps_before else _cut(config, is_free, steps_before, steps)


def _with_free(config: Config, is_free: IsFree, values: dict[str, Any]) -> Config:
    return replace_values(config, {name: value for name, value in values.items() if is_free(name)})


def _offline(config: Config, chosen: Set[str], is_free: IsFree) -> Config:
    if not any(name.split(".")[0] == "data" for name in chosen):
        data = Data(name="stdlib", tokenizer="bytes", on_bad_document="skip", max_tokens=OFFLINE_TOKENS)
        data = replace(data, document_mask=config.data.document_mask)
        # resolving raises the vocabulary to the size of the tokenizer
        config = _with_free(replace(config, data=data), is_free, {"size.vocab_size": 2})
    # for such narrow models, more threads only add synchronization
    config = _with_free(config, is_free, {"precision.name": "fp32", "training.num_threads": 1})
    unsharded = {"deepspeed.stage": 0, "deepspeed.offload": "none"}
    return replace_values(config, unsharded) if is_free("deepspeed.stage") else config


def _widths(config: Config) -> dict[str, int]:
    size, divisor = config.size, config.budget.width_divisor
    widths = {name: value_of(size, name) for name in WIDTHS}
    # enough experts remain for a token to have a choice
    fewest = max(size.num_experts // divisor, 2 * size.experts_per_token)
    unit = math.lcm(config.backbone.router_groups, config.deepspeed.experts)
    return {
        **{f"size.{name}": divide_width(width, divisor) for name, width in widths.items() if width is not None},
        "size.num_experts": min(size.num_experts, math.ceil(fewest / unit) * unit),
    }


def _batch(config: Config, chosen: Set[str], is_free: IsFree) -> dict[str, int | None]:
    budget, training = config.budget, config.training
    values: dict[str, int | None] = {}
    length, batch_size = training.sequence_length, training.batch_size
    if budget.sequence_length is not None and is_free("training.sequence_length"):
        length = min(length, budget.sequence_length)
        values["training.sequence_length"] = length
    if "training.batch_tokens" in chosen and training.batch_tokens is not None:
        # of the shorter sequences
        batch_size = values["training.batch_size"] = max(1, training.batch_tokens // length)
    if budget.batch_tokens is not None:
        # that of the protocol is for its batch
        values["training.micro_batch_size"] = None
        if not {"training.batch_size", "training.batch_tokens"} & chosen:
            batch_size = max(1, min(batch_size, budget.batch_tokens // length))
            values |= {"training.batch_tokens": None, "training.batch_size": batch_size}
        most = VALIDATION_BATCHES * max(length, budget.batch_tokens)
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
    config = replace_values(config, {"training.max_steps": steps, "training.max_tokens": None})
    return _with_free(config, is_free, values)


def divide_width(width: int, divisor: int) -> int:
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
