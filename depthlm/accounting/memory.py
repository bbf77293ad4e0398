"""Memory of training on one rank: weights, gradients, optimizer, activations, and what DeepSpeed adds. In bytes.

What a micro-batch takes is counted by a trace of the decoder itself (`depthlm.accounting.tracing`). What the states
take follows from the ZeRO stage; DeepSpeed's buffers are those of version 0.19.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from depthlm.accounting.tracing import Trace, trace
from depthlm.build import build_model
from depthlm.model import optimizer_groups

if TYPE_CHECKING:
    from depthlm.config import Config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# what glibc keeps of freed blocks below 32 MiB, beside a CPU's activations, without and with checkpointing, whose short
# layers fragment the heap: so much of the activations, and at most so many bytes; measured, of 50 MiB to 1 GiB of them
CPU_WASTE = {False: (0.25, 128 * 2**20), True: (1.5, 320 * 2**20)}
# numbers that DeepSpeed reduces at once where no ZeRO stage does, and that ZeRO 3 keeps gathered
REDUCED, GATHERED = 500_000_000, 1_000_000_000


class UntracedError(RuntimeError):
    """The decoder cannot be traced: its code needs numbers, which meta has none of."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    gradients: with those that DeepSpeed adds up in fp32. activations: the most that a micro-batch, or the update after
    it, takes beyond all else. buffers: DeepSpeed's. process: of a CPU, what is there beside tensors.
    offloaded: bytes that rest in the CPU's memory, beside the total.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float = 0.0
    process: float = 0.0
    offloaded: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers + self.process


class MemoryEstimator:
    """The memory of a configuration on `cpu` or `cuda`, which need not be there. It keeps its traces.

    process: bytes of this process beside tensors. line: two micro-batches; what others take is read off the line
    through them, instead of a trace of each.
    """

    def __init__(self, config: "Config", device: str, process: float = 0.0, line: tuple[int, int] | None = None):
        self.config, self.device, self.process, self.line = config, device, process, line
        self.traces: dict[tuple, Trace] = {}

    def estimate(
        self, stage: int, ranks: int, micro_batch_size: int, accumulation: int = 1, checkpointing: bool | None = None
    ) -> Memory:
        """`states`, and what a micro-batch takes.

        accumulation: micro-batches of a step. checkpointing: None: as configured. Raises: UntracedError.
        """
        if checkpointing is None:
            checkpointing = self.config.training.activation_checkpointing
        states = self.states(stage, ranks, accumulation)
        # above ZeRO 0 a gradient leaves for DeepSpeed's buffers as soon as it is there
        traced = self._trace(stage, micro_batch_size, checkpointing, accumulating=stage > 0 or accumulation > 1)
        peak = traced.peak - (states.gradients if stage == 0 and accumulation == 1 else 0.0)
        return replace(states, activations=max(peak + self._waste(peak, checkpointing), states.activations))

    def states(self, stage: int, ranks: int, accumulation: int = 1) -> Memory:
        """What no micro-batch is too small for, under a ZeRO stage (arXiv 1910.02054): 1 divides the optimizer's states
        by the ranks, 2 the gradients too, 3 the weights too. `activations` is what the update takes.
        """
        numbers, precision, sharding = self.parameters, self.config.precision.name, self.config.deepspeed
        if stage == 0:
            # fp32 weights, under autocast for bf16; the gradients are copied into one piece to be reduced
            flat = 4.0 * min(numbers, REDUCED)
            return Memory(4.0 * numbers, 4.0 * numbers, self.moments, flat + self._waste(flat), process=self.process)
        width = DTYPES[precision].itemsize
        # the moments, and the weights in fp32, also where they are in fp32 already
        weights, optimizer = float(width * numbers), (4.0 * numbers + self.moments) / ranks
        gradients = flat = 4.0 * numbers / ranks
        bucket = width * min(sharding.reduce_bucket_size, numbers) * (2.0 if sharding.overlap_comm else 1.0)
        if stage == 1 and precision == "bf16":
            # DeepSpeed's BF16_Optimizer keeps all gradients in both dtypes, and reduces them as ZeRO 0 does
            gradients, bucket, flat = 6.0 * numbers, 0.0, 6.0 * min(numbers, REDUCED)
        elif stage == 1 and accumulation > 1:
            gradients += width * numbers
        if stage < 3 and precision == "fp32" and accumulation == 1:
            # gradients of the weights' dtype are read from the bucket
            gradients = max(0.0, gradients - bucket)
        if stage == 3:
            weights /= ranks
            bucket += width * min(numbers, GATHERED)
        offloaded = 0.0
        if stage == 3 and sharding.offload == "cpu" and self.device != "cpu":
            offloaded, weights, optimizer = weights + optimizer, 0.0, 0.0
        flat += self._waste(flat)
        return Memory(weights, gradients, optimizer, flat, bucket, self.process, offloaded)

    def _waste(self, activations: float, checkpointing: bool = False) -> float:
        share, most = CPU_WASTE[checkpointing]
        return min(share * activations, most) if self.device == "cpu" else 0.0

    @cached_property
    def parameters(self) -> int:
        """How many numbers the weights have."""
        return sum(parameter.numel() for parameter in build_model(self.config, "meta").parameters())

    @cached_property
    def moments(self) -> float:
        """AdamW's two moments in fp32; Muon has one for each hidden matrix."""
        if self.config.optimizer.name != "muon":
            return 8.0 * self.parameters
        groups = optimizer_groups(build_model(self.config, "meta"), self.config.optimizer.weight_decay)
        return float(
            sum((4 if group["kind"] == "matrix" else 8) * p.numel() for group in groups for p in group["params"])
        )

    def _trace(self, stage: int, micro_batch_size: int, checkpointing: bool, accumulating: bool) -> Trace:
        if self.line is not None and micro_batch_size not in self.line:
            (x0, x1), how = self.line, (checkpointing, accumulating)
            ends = self._trace(stage, x0, *how), self._trace(stage, x1, *how)
            share = (micro_batch_size - x0) / (x1 - x0)
            return Trace(*(round(a + share * (b - a)) for a, b in zip(*map(astuple, ends), strict=True)))
        training, precision = self.config.training, DTYPES[self.config.precision.name]
        half_weights = stage > 0 and precision != torch.float32
        key = (half_weights, stage == 3, micro_batch_size, checkpointing, accumulating)
        if key not in self.traces:
            model = build_model(self.config, "meta")
            if half_weights:
                model.to(precision)
            if checkpointing:
                model.checkpoint_activations()
            if stage == 3:
                model.read_alone()
            # which token ends a text changes no shape
            model.end_of_text = 0 if self.config.data.document_mask else None
            autocast = None if half_weights or precision == torch.float32 else precision
            sizes = (micro_batch_size, training.sequence_length)
            try:
                self.traces[key] = trace(model, self.device, *sizes, autocast, training.z_loss, accumulating)
            except Exception as error:
                # a mechanism may be anybody's
                raise UntracedError(f"{self.config.model.name} cannot be traced on meta: {error}") from error
        return self.traces[key]


def largest(sizes: Sequence[int], available: float, total: Callable[[int], float]) -> int | None:
    """The largest of these micro-batches (ascending) whose total is no more than available; None: not the smallest.

    Totals rise almost in proportion, so that the next one to ask for lies on the line between two known ones.
    """
    low, high = 0, len(sizes) - 1
    known = {low: total(sizes[low])}
    if known[low] > available:
        return None
    known[high] = total(sizes[high])
    if known[high] <= available:
        return sizes[high]
    while high - low > 1:
        slope = (known[high] - known[low]) / (sizes[high] - sizes[low])
        aim = sizes[low] + (available - known[low]) / slope
        # the last that the line says fits, and after it the first that it says does not
        between = range(low + 1, high)
        middle = max((i for i in between if sizes[i] <= aim), default=low + 1)
        known[middle] = total(sizes[middle])
        low, high = (middle, high) if known[middle] <= available else (low, middle)
    return sizes[low]
