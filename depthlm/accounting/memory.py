"""The memory of training on one rank, in bytes: weights, gradients, optimizer, activations and DeepSpeed's buffers.

A trace of the decoder counts the memory of a micro-batch (`depthlm.accounting.tracing`). The memory of the states
follows from the ZeRO stage. DeepSpeed's buffers are those of version 0.19.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from depthlm.accounting.tracing import Trace, trace
from depthlm.build import build_model
from depthlm.config import Config
from depthlm.errors import UserError
from depthlm.model import Decoder
from depthlm.model.experts import Spread
from depthlm.model.parameters import fp32_parameters
from depthlm.optimizers.build import state_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# freed blocks below 32 MiB that glibc retains on a CPU, without and with activation checkpointing, which fragments the
# heap: (fraction of the activations, upper bound in bytes); measured with activations of 50 MiB to 1 GiB
CPU_WASTE = {False: (0.25, 128 * 2**20), True: (1.5, 320 * 2**20)}
# elements that DeepSpeed's BF16_Optimizer reduces at once, and elements that ZeRO 3 keeps gathered
REDUCED, GATHERED = 500_000_000, 1_000_000_000


class UntracedError(RuntimeError):
    """The decoder or optimizer cannot be traced, because its code needs values, which meta tensors do not have."""


@dataclass(frozen=True)
class Memory:
    """The memory of one rank, in bytes.

    gradients: including those that DeepSpeed accumulates in fp32. activations: the peak of a micro-batch, or of the
    update after it, in addition to the other fields. buffers: those of DeepSpeed. process: on a CPU, the process's
    memory outside of tensors. offloaded: bytes in the CPU's memory, not part of the total.
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


class Sizes(NamedTuple):
    """The number of parameters of a decoder, and the bytes of the optimizer's states of fp32 weights."""

    parameters: int
    optimizer: float


class MemoryEstimator:
    """Estimates the memory of a configuration on `cpu` or `cuda`, which this machine need not have. Caches its traces.

    process: bytes of this process outside of tensors. line: two micro-batch sizes that are traced; the memory of other
    sizes is interpolated linearly between them.
    """

    def __init__(self, config: Config, device: str, process: float = 0.0, line: tuple[int, int] | None = None):
        self.config, self.device, self.process, self.line = config, device, process, line
        self.traces: dict[tuple, Trace] = {}

    def estimate(
        self,
        stage: int,
        ranks: int,
        micro_batch_size: int,
        accumulation: int = 1,
        checkpointing: bool | int | str | None = None,
    ) -> Memory:
        """Return the memory of `states` and of one micro-batch.

        accumulation: micro-batches per step. checkpointing: None: as configured. Raises UntracedError.
        """
        if checkpointing is None:
            checkpointing = self.config.training.activation_checkpointing
        states = self.states(stage, ranks, accumulation)
        # above ZeRO 0, DeepSpeed moves each gradient to its own buffers as soon as it is computed
        traced = self._trace(stage, micro_batch_size, checkpointing, accumulating=stage > 0 or accumulation > 1)
        peak = traced.peak - (states.gradients if stage == 0 and accumulation == 1 else 0.0)
        peak += self._waste(peak, checkpointing)
        # the activations of a graph stay reserved during the update
        activations = peak + states.activations if self.has_graphs(stage) else max(peak, states.activations)
        return replace(states, activations=activations)

    def has_graphs(self, stage: int) -> bool:
        """Return whether a run may replay CUDA graphs (`training.cuda_graphs`)."""
        training, spread = self.config.training, self.config.deepspeed.experts > 1
        excluded = stage > 0 or spread or training.profile or training.cuda_graphs is False
        return self.device == "cuda" and not excluded

    def states(self, stage: int, ranks: int, accumulation: int = 1) -> Memory:
        """Return the memory under a ZeRO stage (arXiv 1910.02054) that does not depend on the micro-batch.

        Stage 1 divides the optimizer states by the number of ranks, stage 2 also the gradients, stage 3 also the
        weights. `activations` is the memory of the update. Experts that are spread over ranks are divided by their
        number first, so each rank's share under ZeRO is the same as without spreading.
        """
        total, precision, sharding = self.whole.parameters, self.config.precision.name, self.config.deepspeed
        resident = self.rank.parameters if stage < 3 else total
        if stage == 0:
            # the weights are fp32, under autocast for bf16; several ranks copy gradients: a bucket at a time, or all of
            # them after a graph
            copied = resident if self.has_graphs(stage) else min(resident, sharding.bucket_elements(stage))
            flat = 4.0 * copied if ranks > 1 else 0.0
            if ranks > 1 and sharding.communication_data_type in ("bf16", "fp16"):
                flat += 2.0 * resident
            weights, flat = 4.0 * resident, flat + self._waste(flat)
            return Memory(weights, weights, self.rank.optimizer, flat, process=self.process)
        width = DTYPES[precision].itemsize
        # the optimizer's states and an fp32 copy of the weights, even if they are fp32 already
        weights, optimizer = float(width * resident), (4.0 * total + self.whole.optimizer) / ranks
        gradients = flat = 4.0 * total / ranks
        bucket = width * min(sharding.bucket_elements(stage), resident) * (2.0 if sharding.overlap_comm else 1.0)
        if stage == 1 and precision == "bf16":
            # DeepSpeed's BF16_Optimizer keeps all gradients in both dtypes, and reduces them as ZeRO 0 does
            gradients, bucket, flat = 6.0 * resident, 0.0, 6.0 * min(resident, REDUCED)
        elif stage == 1 and accumulation > 1:
            gradients += width * resident
        if stage < 3 and precision == "fp32" and accumulation == 1:
            # the update reads gradients in the weights' dtype directly from the bucket
            gradients = max(0.0, gradients - bucket)
        if stage == 3:
            weights /= ranks
            bucket += width * min(total, GATHERED)
        offloaded = 0.0
        if stage == 3 and sharding.offload == "cpu" and self.device != "cpu":
            # the update is on the CPU too
            offloaded = weights + optimizer + gradients + flat
            weights = optimizer = gradients = flat = 0.0
        flat += self._waste(flat)
        return Memory(weights, gradients, optimizer, flat, bucket, self.process, offloaded)

    def _waste(self, activations: float, checkpointing: bool | int | str = False) -> float:
        fraction, maximum = CPU_WASTE[bool(checkpointing)]
        return min(fraction * activations, maximum) if self.device == "cpu" else 0.0

    @cached_property
    def whole(self) -> Sizes:
        """The sizes of the whole decoder. Raises UntracedError."""
        return self._sizes(build_model(self.config, "meta"))

    @cached_property
    def rank(self) -> Sizes:
        """The sizes of a rank's decoder, which lacks the experts of other ranks. Raises UntracedError."""
        return self._sizes(rank_decoder(self.config)) if self.config.deepspeed.experts > 1 else self.whole

    def _sizes(self, model: Decoder) -> Sizes:
        try:
            optimizer = float(state_bytes(model, self.config.optimizer))
        except UserError:
            raise
        except Exception as error:
            # a user's optimizer may raise anything
            raise UntracedError(
                f"{self.config.optimizer._target_} cannot make a step without values: {error}"
            ) from error
        return Sizes(sum(parameter.numel() for parameter in model.parameters()), optimizer)

    def _trace(self, stage: int, micro_batch_size: int, checkpointing: bool | int | str, accumulating: bool) -> Trace:
        if self.line is not None and micro_batch_size not in self.line:
            (low, high), settings = self.line, (checkpointing, accumulating)
            ends = self._trace(stage, low, *settings), self._trace(stage, high, *settings)
            share = (micro_batch_size - low) / (high - low)
            return Trace(*(round(a + share * (b - a)) for a, b in zip(*map(astuple, ends), strict=True)))
        training, precision = self.config.training, DTYPES[self.config.precision.name]
        half_weights = stage > 0 and precision != torch.float32
        key = (half_weights, stage == 3, micro_batch_size, checkpointing, accumulating)
        if key not in self.traces:
            model = rank_decoder(self.config) if stage < 3 else build_model(self.config, "meta")
            if half_weights:
                model.to(precision)
                for parameter in fp32_parameters(model).values():
                    parameter.data = parameter.data.float()
            model.checkpoint_activations(checkpointing)
            if stage == 3:
                model.read_alone()
            # any token will do, because it does not affect shapes
            model.mask_documents(self.config.data.document_mask, 0)
            autocast = None if half_weights or precision == torch.float32 else precision
            sizes = (micro_batch_size, training.sequence_length)
            try:
                self.traces[key] = trace(model, self.device, *sizes, autocast, training.z_loss, accumulating)
            except Exception as error:
                # a user's mechanism may raise anything
                raise UntracedError(f"{self.config.model.name} cannot be traced on meta: {error}") from error
        return self.traces[key]


def rank_decoder(config: Config) -> Decoder:
    """Return the decoder of a rank on meta, without experts that are spread over other ranks."""
    model, ranks = build_model(config, "meta"), config.deepspeed.experts
    for mixture in model.mixtures() if ranks > 1 else ():
        for name, parameter in list(mixture.experts.named_parameters()):
            mixture.experts.keep(name, parameter.detach(), Spread(None, 0, ranks))
    return model


def largest(sizes: Sequence[int], available: float, total: Callable[[int], float]) -> int | None:
    """Return the largest of these sizes (ascending) whose total does not exceed `available`; None if none fits.

    A larger size is taken to have a larger total; the largest of all is tried first, since it may not accumulate. Then
    the smallest one is tried, since most often nothing fits.
    """
    if total(sizes[-1]) <= available:
        return sizes[-1]
    if total(sizes[0]) > available:
        return None
    return sizes[bisect.bisect_right(sizes, available, 1, len(sizes) - 1, key=total) - 1]
