"""Check before a run is built whether it fits in memory, and if not, suggest settings that do."""

import logging
from collections.abc import Iterator

import torch

from depthlm.accounting.memory import Memory, MemoryEstimator, UntracedError, largest
from depthlm.config import Config
from depthlm.counts import gib_text
from depthlm.distributed.launchers import Ranks
from depthlm.errors import UserError
from depthlm.machine.memory import process_bytes
from depthlm.model.decoder import SELECTIVE

log = logging.getLogger("depthlm")

# share of the memory that a run may be estimated to need: other processes, and CUDA's own memory, are not estimated.
# Above it, a GPU may run out of memory, which ends the run; a CPU's machine may swap, which ends everything on it
SAFE_SHARE = 0.8
# memory that a process on a CPU takes before its first step besides tensors: DeepSpeed's code, threads, buffers
STARTUP_BYTES = 64 * 2**20


def check_memory(config: Config, ranks: Ranks, device: torch.device, available: int) -> Memory | None:
    """Return the memory estimate of a rank; None, with a warning, if the decoder or optimizer cannot be traced.

    available: the bytes that every rank has. On a GPU, logs a warning if the estimate is above 80% of them.
    Raises UserError with settings that fit if the estimate is above all of them (on a CPU: above 80%), unless
    memory=ignore.
    """
    training, stage = config.training, config.deepspeed.stage
    if training.pipeline.stages > 1:
        log.info("memory is not checked: the estimate is that of a rank with all layers, and a pipeline spreads them")
        return None
    share = training.batch_size // ranks.world_size
    estimator = MemoryEstimator(config, device.type)
    micro_batch_size = training.micro_batch_size or share
    settings = (stage, ranks.world_size, micro_batch_size, share // micro_batch_size)
    try:
        memory = estimator.estimate(*settings)
        if device.type == "cpu":
            # measured after a first trace, which imports what training imports
            estimator.process = process_bytes() + STARTUP_BYTES
            memory = estimator.estimate(*settings)
    except UntracedError as error:
        log.warning("memory is not checked: %s", error)
        return None
    safe = int(SAFE_SHARE * available)
    if device.type == "cuda":
        limit, where = available, "is what each GPU has"
    else:
        limit, where = safe, f"is {SAFE_SHARE:.0%} of the memory for each rank, above which the machine may swap"
    comparison = f"{gib_text(memory.total)} estimated, {gib_text(limit)} {where}"
    if memory.total > limit and config.memory == "check":
        remedies = list(what_fits(estimator, config, ranks, limit))
        if remedies:
            advice = "\n".join(["one of these fits:", *(f"  - {remedy}" for remedy in remedies)])
        else:
            stages = ", at any ZeRO stage" if ranks.world_size > 1 else ""
            states = estimator.states(stage, ranks.world_size).total
            advice = (
                f"no micro-batch fits, with or without activation checkpointing{stages}: without activations it needs "
                f"{gib_text(states)}; use a smaller size=, a larger machine, or more ranks with deepspeed=zero3"
            )
        raise UserError(f"the run does not fit in memory: {comparison}\n{advice}\nmemory=ignore starts the run anyway")
    if memory.total > safe:
        verb = "does not fit" if memory.total > limit else "may not fit"
        log.warning("the run %s in memory: %s", verb, comparison)
    return memory


def what_fits(estimator: MemoryEstimator, config: Config, ranks: Ranks, available: int) -> Iterator[str]:
    """Yield overrides with which the run fits, each with its estimate: first at the configured ZeRO stage, then at the
    higher stages, which need several ranks."""
    training, sharding, world = config.training, config.deepspeed, ranks.world_size
    share = training.batch_size // world
    configured = training.micro_batch_size or share
    sizes = [size for size in range(1, configured + 1) if share % size == 0]
    highest = 2 if training.compile is True or sharding.experts > 1 else 3
    in_fp32 = config.precision.fp32_residual and config.precision.name != "fp32"
    if world == 1 or config.optimizer.needs_matrices or in_fp32:
        highest = sharding.stage
    given = training.activation_checkpointing
    # compiled sublayers cannot be recomputed selectively
    choices: list[bool | int | str] = [False, SELECTIVE, True]
    if given or training.compile is True:
        choices = list(dict.fromkeys([given, True]))
    for stage in range(sharding.stage, highest + 1):
        if estimator.states(stage, world).total > available:
            continue
        for checkpointing in choices:

            def total(size: int, stage: int = stage, checkpointing: bool | int | str = checkpointing) -> float:
                return estimator.estimate(stage, world, size, share // size, checkpointing).total

            try:
                size = largest(sizes, available, total)
            except UntracedError:
                # a mechanism of the user, perhaps with this choice alone
                size = None
            if size is None:
                continue
            overrides = [f"deepspeed=zero{stage}"] if stage > sharding.stage else []
            if checkpointing != given:
                overrides.append(f"training.activation_checkpointing={str(checkpointing).lower()}")
            if size < configured:
                overrides.append(f"training.micro_batch_size={size}")
            yield f"{' '.join(overrides)} ({gib_text(total(size))})"
            if size == configured:
                break
