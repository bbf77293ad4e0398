"""Budgets: shrink a configuration to run the same experiment at lower cost."""

import math
from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any

from depthlm.config.keys import replaced, value_of
from depthlm.config.schema import Config, run_steps
from depthlm.data.settings import Data
from depthlm.model.shape import Size

# tokens (bytes) of the standard library to use, and batches of the validation set
OFFLINE_TOKENS, VALIDATION_BATCHES = 2_000_000, 4
WIDTHS = ("hidden_size", "intermediate_size", "expert_size", "head_size", "latent_size", "shared_key_size")
LENGTHS = ("training.max_steps", "training.max_tokens", "training.max_epochs")

# whether a key may change: the command line sets neither it nor its group
IsFree = Callable[[str], bool]


def with_budget(config: Config, chosen: Set[str]) -> Config:
    """Return a configuration shrunk to its budget.

    Depth, mechanism and the shape of the schedule do not change: warm-up and validation keep their share of the run.

    chosen: the keys and groups that the command line sets; they stay unchanged.
    """

    def is_free(name: str) -> bool:
        return not {name, name.rpartition(".")[0]} & chosen

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
