"""Whether a run fits in memory, before anything of it is built; and if not, what would."""

import logging
from collections.abc import Iterator

import torch

from depthlm.analysis.memory import Memory, MemoryEstimator, UntracedError, largest
from depthlm.config import Config
from depthlm.errors import UserError
from depthlm.launchers import Ranks
from depthlm.machine_memory import process_bytes

log = logging.getLogger("depthlm")

# a share of the memory above which it may not suffice: what an allocator loses, and what else runs there, is not counted
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
    try:
        estimator.estimate(stage, ranks.world_size, 1)
        if device.type == "cpu":
            # after a first trace, for what that imports, training imports too
            estimator.process = process_bytes() + STARTED
        micro_batch_size = training.micro_batch_size or share
        memory = estimator.estimate(stage, ranks.world_size, micro_batch_size, share // micro_batch_size)
    except UntracedError as error:
        log.warning("memory is not checked: %s", error)
        return None
    where = "this GPU has" if device.type == "cuda" else "this machine has for each rank"
    found = f"{gib(memory.total)} estimated, {gib(available)} is what {where}"
    if memory.total > available and config.memory == "check":
        remedies = list(what_fits(estimator, config, ranks, available))
        fits = "\n".join(f"  - {remedy}" for remedy in remedies) or (
            "  nothing fits: no micro-batch, with or without activation checkpointing"
            f"{', at no ZeRO stage' if ranks.world_size > 1 else ''}; take a smaller size=, or a larger machine"
        )
        raise UserError(
            f"the run does not fit in memory: {found}\n{fits if not remedies else 'what fits, one of:' + chr(10) + fits}"
            "\nmemory=ignore starts it anyway"
        )
    if memory.total > TIGHT * available:
        doubt = "does not fit" if memory.total > available else "may not fit"
        log.warning("the run %s in memory: %s", doubt, found)
    return memory


def what_fits(estimator: MemoryEstimator, config: Config, ranks: Ranks, available: int) -> Iterator[str]:
    """Overrides with which the run fits, each with its estimate."""
    training, stage, world = config.training, config.deepspeed.stage, ranks.world_size
    share = training.batch_size // world
    wanted = training.micro_batch_size or share
    sizes = [size for size in range(1, wanted + 1) if share % size == 0]
    checkpointing = "training.activation_checkpointing=true"

    def total(stage: int, size: int, checkpointed: bool) -> float:
        return estimator.estimate(stage, world, size, share // size, checkpointed).total

    choices = [False, True] if not training.activation_checkpointing else [True]
    for checkpointed in choices:
        add = f"{checkpointing} " if checkpointed and not training.activation_checkpointing else ""
        size = largest(sizes, available, lambda size, on=checkpointed: total(stage, size, on))  # type: ignore[misc]
        if size is not None:
            micro = f"training.micro_batch_size={size}" if size < wanted or not add else ""
            yield f"{add}{micro}".strip() + f" ({gib(total(stage, size, checkpointed))})"
    if world == 1 or config.optimizer.name == "muon":
        return
    for higher in range(stage + 1, 3 if training.compile else 4):
        for checkpointed in choices:
            bytes_needed = total(higher, wanted, checkpointed)
            if bytes_needed <= available:
                add = f" {checkpointing}" if checkpointed and not training.activation_checkpointing else ""
                yield f"deepspeed=zero{higher}{add} ({gib(bytes_needed)})"
                return


def gib(count: float) -> str:
    """Bytes as GiB."""
    return f"{count / 2**30:.2f} GiB"
