"""Whether a run fits in memory, before anything of it is built; and if not, what would."""

import logging
from collections.abc import Iterator

import torch

from depthlm.accounting.memory import Memory, MemoryEstimator, UntracedError, largest
from depthlm.config import Config
from depthlm.distributed.launchers import Ranks
from depthlm.errors import UserError
from depthlm.machine.memory import process_bytes

log = logging.getLogger("depthlm")

# the share of the memory from which on a run is warned of: what else runs there, and what CUDA takes, is not counted
TIGHT = 0.8
# what a process on a CPU takes until its first step, beside tensors: DeepSpeed's code, threads and their buffers
STARTED = 64 * 2**20


def check_memory(config: Config, ranks: Ranks, device: torch.device, available: int) -> Memory | None:
    """The memory estimate of a rank; None where the decoder cannot be traced, which is logged.

    available: bytes that every rank has. Logs a warning where the estimate is above 80% of it.
    Raises UserError where it is above, with what would fit, unless memory=ignore.
    """
    training, stage = config.training, config.deepspeed.stage
    share = training.batch_size // ranks.world_size
    estimator = MemoryEstimator(config, device.type)
    micro_batch_size = training.micro_batch_size or share
    wanted = (stage, ranks.world_size, micro_batch_size, share // micro_batch_size)
    try:
        memory = estimator.estimate(*wanted)
        if device.type == "cpu":
            # only now, for what a trace imports, training imports too
            estimator.process = process_bytes() + STARTED
            memory = estimator.estimate(*wanted)
    except UntracedError as error:
        log.warning("memory is not checked: %s", error)
        return None
    where = "this GPU has" if device.type == "cuda" else "this machine has for each rank"
    found = f"{gib(memory.total)} estimated, {gib(available)} is what {where}"
    if memory.total > available and config.memory == "check":
        remedies = list(what_fits(estimator, config, ranks, available))
        if remedies:
            advice = "\n".join(["one of these fits:", *(f"  - {remedy}" for remedy in remedies)])
        else:
            stages = ", at any ZeRO stage" if ranks.world_size > 1 else ""
            alone = estimator.states(stage, ranks.world_size).total
            advice = (
                f"no micro-batch fits, with or without activation checkpointing{stages}: without activations it is "
                f"{gib(alone)}; take a smaller size=, a larger machine, or more ranks with deepspeed=zero3"
            )
        raise UserError(f"the run does not fit in memory: {found}\n{advice}\nmemory=ignore starts it anyway")
    if memory.total > TIGHT * available:
        doubt = "does not fit" if memory.total > available else "may not fit"
        log.warning("the run %s in memory: %s", doubt, found)
    return memory


def what_fits(estimator: MemoryEstimator, config: Config, ranks: Ranks, available: int) -> Iterator[str]:
    """Overrides with which the run fits, each with its estimate: of the ZeRO stage that is configured, then of those
    above it, which need several ranks."""
    training, sharding, world = config.training, config.deepspeed, ranks.world_size
    share = training.batch_size // world
    wanted = training.micro_batch_size or share
    sizes = [size for size in range(1, wanted + 1) if share % size == 0]
    highest = 2 if training.compile else 3
    if world == 1 or config.optimizer.name == "muon":
        highest = sharding.stage
    for stage in range(sharding.stage, highest + 1):
        if estimator.states(stage, world).total > available:
            continue
        for checkpointing in (False, True) if not training.activation_checkpointing else (True,):

            def total(size: int, stage: int = stage, checkpointing: bool = checkpointing) -> float:
                return estimator.estimate(stage, world, size, share // size, checkpointing).total

            size = largest(sizes, available, total)
            if size is None:
                continue
            overrides = [f"deepspeed=zero{stage}"] if stage > sharding.stage else []
            if checkpointing and not training.activation_checkpointing:
                overrides.append("training.activation_checkpointing=true")
            if size < wanted:
                overrides.append(f"training.micro_batch_size={size}")
            yield f"{' '.join(overrides)} ({gib(total(size))})"
            if size == wanted:
                break


def gib(count: float) -> str:
    """Bytes as GiB."""
    return f"{count / 2**30:.2f} GiB"
