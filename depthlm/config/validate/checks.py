"""Checks of a configuration across its fields. All mistakes are reported."""

from collections.abc import Set

from depthlm.config.names import check_name
from depthlm.config.resolve import LENGTHS, tokenizer_exists
from depthlm.config.schema import Config, run_steps, warmup_steps
from depthlm.config.validate.decoder import check_divides, check_mechanism, check_parametrization, check_shape
from depthlm.config.validate.pipeline import check_pipeline
from depthlm.data import DataError, is_remote, padded_vocab_size, shares, train_sources
from depthlm.distributed import launchers
from depthlm.errors import UserError, join_names
from depthlm.fields import TINY

# overrides that choose the class of the optimizer
OPTIMIZER_CLASS = ("optimizer", "optimizer._target_")


def check_together(config: Config, given: Set[str]) -> list[str]:
    """Return the mistakes across fields: indivisible shapes, conflicting settings.

    given: the keys and groups that the overrides set.
    """
    return [
        *(f"{name}=...: is computed; leave it out" for name in given if name.startswith(("code", "differences"))),
        *check_name(config.name, config.output_dir),
        *check_shape(config),
        *_check_vocabulary(config, given),
        *check_mechanism(config),
        *check_parametrization(config),
        *_check_batch(config, given),
        *_check_length(config),
        *_check_optimizer(config, given),
        *_check_checkpoints(config),
        *_check_evaluation(config),
        *_check_recomputation(config),
        *_check_sharding(config),
        *_check_spread(config),
        *check_pipeline(config),
        *_check_data(config),
    ]


def check_steps(config: Config, steps: int) -> list[str]:
    """Return the mistakes of a schedule that does not fit into a run of `steps` steps."""
    schedule, errors = config.schedule, []
    warmup = warmup_steps(config, steps)
    if warmup > steps:
        errors.append(f"schedule.warmup_steps={warmup}: longer than the run of {steps} steps; allowed: 0 to {steps}")
    if schedule.name == "inverse_sqrt" and warmup == 0:
        errors.append("schedule.name=inverse_sqrt: needs a warm-up; give schedule.warmup_steps, 1 or more")
    if schedule.name == "wsd" and warmup + round(schedule.decay_ratio * steps) > steps:
        errors.append(
            f"schedule.decay_ratio={schedule.decay_ratio}: warm-up ({warmup} steps) and decay overlap in {steps} steps"
        )
    return errors


def _check_vocabulary(config: Config, given: Set[str]) -> list[str]:
    size, data = config.size, config.data
    needed = padded_vocab_size(data) if tokenizer_exists(config) else 0
    if "size.vocab_size" not in given or size.vocab_size >= needed:
        return []
    return [
        f"size.vocab_size={size.vocab_size}: data.tokenizer={data.tokenizer} needs {needed} "
        f"(padded to a multiple of {data.pad_vocab_multiple}); leave it out, or give a larger one"
    ]


def _check_batch(config: Config, given: Set[str]) -> list[str]:
    training, length = config.training, config.training.sequence_length
    if training.batch_tokens is not None:
        if "training.batch_size" in given:
            return ["training.batch_size and training.batch_tokens: both given; give one"]
        if training.batch_tokens % length:
            return [
                f"training.batch_tokens={training.batch_tokens}: is not divisible by sequence_length={length}; "
                f"allowed: multiples of {length}"
            ]
    return check_share(config, launchers.ranks().world_size)


def check_share(config: Config, ranks: int) -> list[str]:
    """Return the mistake of a batch, or of a micro-batch, that this number of ranks cannot share.

    The ranks of a pipeline have one share.
    """
    training = config.training
    ranks, name = training.pipeline.replicas(ranks), "ranks" if training.pipeline.stages == 1 else "pipelines"
    if training.batch_size % ranks:
        return [
            f"training.batch_size={training.batch_size}: is not divisible by the {ranks} {name} of this run; "
            f"allowed: multiples of {ranks}"
        ]
    share = training.batch_size // ranks
    if training.micro_batch_size is not None and share % training.micro_batch_size:
        return [
            f"training.micro_batch_size={training.micro_batch_size}: does not divide a share of the batch, "
            f"{training.batch_size} / {ranks} {name} = {share}; "
            f"allowed: {join_names(m for m in range(1, share + 1) if share % m == 0)}"
        ]
    return []


def _check_length(config: Config) -> list[str]:
    training, schedule, errors = config.training, config.schedule, []
    lengths = [name for name in LENGTHS if getattr(training, name.removeprefix("training.")) is not None]
    if len(lengths) > 1:
        errors.append(f"{' and '.join(lengths)}: {'both' if len(lengths) == 2 else 'all'} given; give one")
    if not lengths:
        errors.append(f"training.max_steps: the run has no length; give {' or '.join(LENGTHS)}")
    if schedule.warmup_steps is not None and schedule.warmup_ratio is not None:
        errors.append("schedule.warmup_steps and schedule.warmup_ratio: both given; give one")
    if schedule.warmup_steps is None and schedule.warmup_ratio is None:
        errors.append("schedule.warmup_ratio: give it or schedule.warmup_steps; 0 is no warm-up")
    steps = None if errors else run_steps(config)
    return errors if steps is None else check_steps(config, steps)


def _check_optimizer(config: Config, given: Set[str]) -> list[str]:
    from depthlm.optimizers import build

    optimizer, stage, errors = config.optimizer, config.deepspeed.stage, []
    count = build.number_of_betas(optimizer)
    if len(optimizer.betas) != count or not all(0 <= beta < 1 for beta in optimizer.betas):
        number, example = ("three", "[0.9,0.999,0.9999]") if count == 3 else ("two", "[0.9,0.95]")
        errors.append(f"optimizer.betas={optimizer.betas}: {number} numbers from 0 to below 1, as in {example}")
    elif optimizer._target_ == "pytorch_optimizer.AdEMAMix" and 0 in optimizer.betas[::2]:
        errors.append(
            f"optimizer.betas={optimizer.betas}: the first and the third must be above 0 for {optimizer._target_}"
        )
    accepted = build.arguments(optimizer)
    for name in build.SHARED:
        value = getattr(optimizer, name)
        if f"optimizer.{name}" in given and value is not None and name not in accepted:
            errors.append(f"optimizer.{name}={value}: {optimizer._target_} has no such setting; leave it out")
    eps = optimizer.settings.get("eps")
    if isinstance(eps, (int, float)) and eps < TINY:
        errors.append(f"optimizer.settings.eps={eps}: must be a number, at least {TINY}")
    if optimizer.needs_matrices and stage > 0:
        errors.append(
            f"optimizer={optimizer.name} with deepspeed.stage={stage}: {optimizer._target_} needs whole matrices, "
            "which ZeRO 1 and above flatten; allowed: deepspeed=zero0, which runs on many ranks as well"
        )
    if optimizer.needs_matrices and (experts := config.deepspeed.experts) > 1:
        errors.append(
            f"optimizer={optimizer.name} with deepspeed.experts={experts}: states of {optimizer._target_} are of all "
            "experts of a layer together; allowed: deepspeed.experts=1"
        )
    if build.averages_weights(optimizer):
        if config.schedule.name != "constant":
            errors.append(
                f"optimizer={optimizer.name} with schedule.name={config.schedule.name}: {optimizer._target_} averages "
                "the weights, which replaces the decay of the rate; allowed: schedule=constant, with a warm-up"
            )
        if config.deepspeed.experts > 1:
            errors.append(
                f"optimizer={optimizer.name} with deepspeed.experts={config.deepspeed.experts}: spread experts are "
                "resumed from the exported weights, which are averages here; leave deepspeed.experts out"
            )
    # the bounds of the keys are enough for the default class, and building takes seconds: it imports torch's compiler
    if not errors and any(name in OPTIMIZER_CLASS or name.startswith("optimizer.settings") for name in given):
        from torch import nn

        try:
            build.build_optimizer(nn.Linear(2, 2), optimizer)
        except UserError as error:
            errors.extend(str(error).splitlines())
    return errors


def _check_checkpoints(config: Config) -> list[str]:
    keep_every, every = config.training.keep_every, config.training.checkpoint_every
    if keep_every is not None and keep_every % every:
        return [
            f"training.keep_every={keep_every}: regular checkpoints are those of training.checkpoint_every={every}; "
            f"allowed: multiples of {every}"
        ]
    return []


def _check_evaluation(config: Config) -> list[str]:
    evaluation, every = config.evaluation, config.training.checkpoint_every
    given = [name for name in ("tasks", "sets") if getattr(evaluation, name)]
    if evaluation.every is None:
        return [f"evaluation.{name}: no step is evaluated; give evaluation.every={every}" for name in given[:1]]
    errors = []
    if evaluation.every % every:
        errors.append(
            f"evaluation.every={evaluation.every}: only checkpoints are evaluated, and "
            f"training.checkpoint_every={every}; allowed: multiples of {every}"
        )
    if not given:
        errors.append(
            f"evaluation.every={evaluation.every}: nothing to evaluate; give evaluation.tasks or evaluation.sets"
        )
    for name in ("shots", "limit"):
        if getattr(evaluation, name) is not None and not evaluation.tasks:
            errors.append(f"evaluation.{name}: has an effect only with evaluation.tasks; give tasks, or leave it out")
    if min(evaluation.shots or [0]) < 0:
        errors.append(f"evaluation.shots={evaluation.shots}: must be at least 0")
    return errors


def _check_recomputation(config: Config) -> list[str]:
    if config.training.activation_checkpointing == "selective" and config.training.compile is True:
        return [
            "training.activation_checkpointing=selective with training.compile=true: compiled sublayers already store "
            "their matrix products and recompute the rest; allowed: activation_checkpointing=false, true or n, or "
            "training.compile=auto, which then does not compile"
        ]
    return []


def _check_sharding(config: Config) -> list[str]:
    stage, offload, errors = config.deepspeed.stage, config.deepspeed.offload, []
    if config.precision.name == "fp16" and stage == 0:
        errors.append(
            "precision=fp16 with deepspeed=zero0: DeepSpeed's fp16 at stage 0 takes a wrong first step; "
            "use deepspeed=zero1"
        )
    if offload != "none" and stage != 3:
        errors.append(
            f"deepspeed.offload={offload} with deepspeed.stage={stage}: only ZeRO 3 can offload its shards; "
            "allowed: deepspeed=zero3_offload"
        )
    if config.precision.fp32_residual and config.precision.name != "fp32" and stage > 0:
        other = "" if config.precision.name == "fp16" else "deepspeed=zero0, or "
        errors.append(
            f"precision.fp32_residual=true with deepspeed.stage={stage}: only ZeRO 0 has fp32 weights under autocast; "
            f"allowed: {other}precision.fp32_residual=false"
        )
    if stage == 3 and config.training.compile is True:
        errors.append(
            "training.compile=true with deepspeed.stage=3: torch.compile cannot follow weights that ZeRO 3 frees; "
            "allowed: deepspeed=zero0, zero1 or zero2, or training.compile=auto"
        )
    return errors


def _check_spread(config: Config) -> list[str]:
    given = f"deepspeed.experts={config.deepspeed.experts}"
    if config.deepspeed.experts == 1:
        return []
    if config.backbone.mlp != "experts":
        return [
            f"{given}: backbone.mlp={config.backbone.mlp} has no experts; leave it out, or give a backbone with "
            "experts, as in backbone=qwen3_moe"
        ]
    if config.deepspeed.stage == 3:
        return [
            f"{given} with deepspeed.stage=3: DeepSpeed cannot spread experts whose weights ZeRO 3 shards; allowed: "
            "deepspeed=zero0, zero1 or zero2, or leave it out"
        ]
    number = config.size.num_experts
    return check_divides("deepspeed.experts", config.deepspeed.experts, f"size.num_experts={number}", number)


def _check_data(config: Config) -> list[str]:
    data, errors = config.data, []
    if data.sources and (unweighted := [name for name, source in data.sources.items() if source.weight is None]):
        errors.append(
            f"data.sources.{unweighted[0]}.weight: missing; every source of a mixture has a share of the tokens"
        )
    elif data.sources:
        try:
            shares([source.weight or 0.0 for source in data.sources.values()])
        except DataError as error:
            errors.append(f"{error.where}: {error.what}; {error.remedy}")
    if both := sorted(data.validation.keys() & train_sources(data).keys()):
        errors.append(f"data.validation.{both[0]}: also the name of a source; give the validation set another name")
    for name, source in data.validation.items():
        if source.weight is not None:
            errors.append(f"data.validation.{name}.weight={source.weight}: a validation set has none; leave it out")
        for chosen, whole in (("validation_files", "files"), ("validation_split", "split")):
            if (value := getattr(source, chosen)) is not None:
                errors.append(
                    f"data.validation.{name}.{chosen}={value}: all of a validation set is for validation; give "
                    f"data.validation.{name}.{whole} instead"
                )
    for name, source in data.sources.items():
        if data.source is not None and source.hub is not None and source.source is None and source.files is None:
            errors.append(
                f"data.source={data.source}: data.sources.{name}.hub={source.hub} has text of its own; give "
                "data.sources.<name>.source, or .files of data.source, to those sources that have local text"
            )
    for source in train_sources(data).values():
        split = source.split or "train"
        if is_remote(source) and split == source.validation_split:
            errors.append(
                f"data.split={split}: the model would be validated on its training text; give another "
                "data.validation_split, or null, which holds out a share of the documents"
            )
    if not data.sources and data.weight is not None:
        errors.append("data.weight: only a source of a mixture has one; give data.sources.<name>.weight")
    return errors
