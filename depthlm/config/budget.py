"""Budgets: shrink a configuration to run the same experiment at lower cost."""

import math
from collections.abc import Set
from functools import partial

from depthlm.config.schema import Config, Data
from depthlm.config.schema.length import run_steps
from depthlm.model.shape import Size

# tokens (bytes) of the standard library to use, and batches of the validation set
OFFLINE_TOKENS, VALIDATION_BATCHES = 2_000_000, 4


def apply_budget(config: Config, chosen: Set[str]) -> None:
    """Shrink a configuration in place to its budget.

    Depth, mechanism and the shape of the schedule do not change: warm-up and validation keep their share of the run.

    chosen: the keys and groups that the command line sets; they stay unchanged.
    """
    budget, training, size = config.budget, config.training, config.size

    free = partial(_free, chosen)
    if budget.offline:
        if not any(name.split(".")[0] == "data" for name in chosen):
            config.data = Data(name="stdlib", tokenizer="bytes", on_bad_document="skip", max_tokens=OFFLINE_TOKENS)
            if free("size.vocab_size"):
                # resolving raises it to the size of the tokenizer
                size.vocab_size = 2
        if free("precision.name"):
            config.precision.name = "fp32"
        if free("training.num_threads"):
            # for such narrow models, more threads only add synchronization
            training.num_threads = 1
        if free("deepspeed.stage"):
            config.deepspeed.stage, config.deepspeed.offload = 0, "none"
    for name in ("hidden_size", "intermediate_size", "expert_size", "head_size", "latent_size", "shared_key_size"):
        if free(f"size.{name}") and getattr(size, name) is not None:
            setattr(size, name, divided(getattr(size, name), budget.width_divisor))
    if free("size.num_experts"):
        # enough experts remain for a token to have a choice
        fewest = max(size.num_experts // budget.width_divisor, 2 * size.experts_per_token)
        unit = math.lcm(config.backbone.router_groups, config.deepspeed.experts)
        size.num_experts = min(size.num_experts, math.ceil(fewest / unit) * unit)
    lengths = {"training.max_steps", "training.max_tokens", "training.max_epochs"}
    shrinks = budget.flops is not None or budget.max_steps is not None
    steps_before = run_steps(config) if shrinks and training.max_epochs is None and not lengths & chosen else None
    tokens_before = (steps_before or 0) * training.batch_size * training.sequence_length
    if budget.sequence_length is not None and free("training.sequence_length"):
        training.sequence_length = min(training.sequence_length, budget.sequence_length)
    if budget.batch_tokens is not None:
        if not {"training.batch_size", "training.batch_tokens"} & chosen:
            training.batch_tokens = None
            training.batch_size = max(1, min(training.batch_size, budget.batch_tokens // training.sequence_length))
        if free("training.validation_tokens"):
            most = VALIDATION_BATCHES * training.batch_size * training.sequence_length
            training.validation_tokens = min(training.validation_tokens or most, most)
    if budget.micro_batch_tokens is not None and free("training.micro_batch_size"):
        most = max(1, budget.micro_batch_tokens // training.sequence_length)
        training.micro_batch_size = math.gcd(training.batch_size, most)
    if steps_before is not None:
        tokens = tokens_before
        if budget.flops is not None:
            # one factor for all points, so that their sizes and lengths keep their proportions
            largest = max(config.experiment.flops or 0.0, 6.0 * matrices(config) * tokens)
            tokens = round(tokens * min(1.0, budget.flops / largest))
        steps = max(1, round(tokens / (training.batch_size * training.sequence_length)))
        _cut_steps(config, chosen, steps_before, min(steps, budget.max_steps or steps))
    elif shrinks and lengths & chosen and config.schedule.warmup_steps and free("schedule.warmup_steps"):
        # the warm-up of the protocol is meant for the length of the protocol
        config.schedule.warmup_steps = min(config.schedule.warmup_steps, max(1, (run_steps(config) or 0) // 10))


def _cut_steps(config: Config, chosen: Set[str], before: int, steps: int) -> None:
    training, schedule, free = config.training, config.schedule, partial(_free, chosen)
    if steps == before:
        return
    training.max_steps, training.max_tokens = steps, None
    if schedule.warmup_steps and free("schedule.warmup_steps"):
        schedule.warmup_steps = max(1, round(schedule.warmup_steps * steps / before))
    if training.validate_every is not None and free("training.validate_every"):
        # in such a short run, frequent validation would cost more than the training steps
        training.validate_every = max(1, steps // 4, round(training.validate_every * steps / before))
    if free("training.log_every"):
        training.log_every = max(1, min(training.log_every, steps // 12))


def _free(chosen: Set[str], name: str) -> bool:
    """Return whether the command line sets neither the key nor its group."""
    return not {name, name.rpartition(".")[0]} & chosen


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
