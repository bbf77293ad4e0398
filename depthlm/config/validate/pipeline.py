"""Checks of a pipeline: what it cannot train, and the ranks and micro-batches that it needs."""

from depthlm.config.keys import override_text
from depthlm.config.schema import Config
from depthlm.errors import join_names


def check_pipeline(config: Config) -> list[str]:
    """Return the mistakes of settings that a pipeline excludes."""
    training, sharding, depth = config.training, config.deepspeed, config.model.loops * config.size.num_layers
    stages, chunks = training.pipeline.stages, training.pipeline.chunks
    if stages == 1:
        given = f"training.pipeline.chunks={chunks}"
        return [f"{given}: needs training.pipeline.stages of 2 or more"] if chunks > 1 else []
    # why each of these settings is refused
    refused: dict[str, str] = {}
    if sharding.stage > 0:
        refused[f"deepspeed.stage={sharding.stage}"] = (
            "ZeRO shards over ranks with the same weights, and each stage has different layers; allowed: "
            "deepspeed=zero0"
        )
    if sharding.communication_data_type != "auto":
        refused[f"deepspeed.communication_data_type={sharding.communication_data_type}"] = (
            "a pipeline reduces gradients in the dtype of the weights; allowed: auto"
        )
    if config.precision.name == "fp16":
        refused["precision=fp16"] = "a pipeline has no loss scale; allowed: precision=bf16 or fp32"
    if config.backbone.mlp == "experts":
        refused["backbone.mlp=experts"] = (
            "the load of the experts is balanced over all layers, which no rank has; allowed: swiglu or relu"
        )
    if training.log_blocks_every is not None:
        refused[f"training.log_blocks_every={training.log_blocks_every}"] = (
            "a pipeline does not measure sublayers; allowed: null"
        )
    if stages * chunks > depth:
        refused[f"training.pipeline.chunks={chunks}"] = (
            f"{stages * chunks} chunks need as many layers; allowed: stages times chunks up to {depth}"
        )
    return [f"training.pipeline.stages={stages} with {name}: {why}" for name, why in refused.items()]


def check_pipeline_ranks(config: Config, ranks: int) -> list[str]:
    """Return the mistakes of a pipeline with so many ranks."""
    training, stages = config.training, config.training.pipeline.stages
    if stages == 1:
        return []
    if ranks % stages:
        allowed = join_names(n for n in range(2, ranks + 1) if ranks % n == 0) or "1, or more ranks"
        return [
            f"training.pipeline.stages={stages}: must divide the number of ranks of this run, {ranks}; "
            f"allowed: {allowed}"
        ]
    share, rest = divmod(training.batch_size, training.pipeline.replicas(ranks))
    if rest:
        # `check_share` reports it
        return []
    micro_batches = share // (training.micro_batch_size or share)
    if micro_batches % stages:
        allowed = join_names(n for n in range(1, share + 1) if share % (n * stages) == 0)
        advice = f"allowed: {allowed}" if allowed else f"give a training.batch_size that {stages} divides"
        return [
            f"training.micro_batch_size={override_text(training.micro_batch_size)}: the number of micro-batches in a "
            f"pipeline's share of the batch, {micro_batches} in {share}, must be a multiple of "
            f"training.pipeline.stages={stages}; {advice}"
        ]
    return []
