"""ZeRO 0: gradients are averaged over the ranks while the backward pass computes them, and an update is skipped on all
ranks if the gradient is not finite on any of them. After a CUDA graph, gradients are averaged when it has ended.

DeepSpeed reduces gradients only after the backward pass at this stage, when no computation is left to overlap with.
After the reduction a value may become non-finite on one rank alone, for example by bad memory. DeepSpeed's optimizers
ask all ranks, except where each of them has the whole gradient: at ZeRO 0, and in bf16 at ZeRO 1.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from depthlm.model.experts import spread_of
from depthlm.training.engine.experts import reduction_group, total_norm
from depthlm.training.engine.replace import replace_attributes

# fused optimizers are slower on gradients that do not start at a multiple of 16 bytes
ALIGNMENT = 16


class Reduction(NamedTuple):
    """An all-reduce in progress. gradients: those of a bucket, flat. reduced: the same in the dtype of communication,
    which is `gradients` itself if the dtypes are equal."""

    gradients: Tensor
    reduced: Tensor
    work: torch.distributed.Work


class Reducer:
    """Averages gradients over all ranks, bucket by bucket, each as soon as the backward pass has computed it.

    The gradient of an expert already has the tokens of all ranks that share a copy of the experts, so the ranks with
    the same experts add their gradients, and the sum is divided by the number of all ranks, as of every other gradient.

    Every rank reduces the same buckets in the same order, since collective operations must match. A parameter without a
    gradient counts as one whose gradient is zero, as in DeepSpeed.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], bucket_size: int, dtype: torch.dtype, due: Callable[[], bool]
    ) -> None:
        """bucket_size: elements. dtype: that of communication. due: whether this backward pass is the last of a batch;
        before it, gradients accumulate on each rank."""
        self.buckets = buckets_of(parameters, bucket_size)
        self.dtype, self.due = dtype, due
        self.alone = torch.distributed.get_world_size() == 1
        self.missing = [len(bucket) for bucket in self.buckets]
        self.running: list[Reduction] = []
        self.is_paused = False
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._count, number))
            for number, bucket in enumerate(self.buckets)
            for parameter in bucket
            if not self.alone
        ]

    def finish(self) -> None:
        """Reduce the remaining buckets, and wait for all; to be called after every backward pass. Collective."""
        if self.is_paused or not self.due():
            return
        if self.alone:
            for parameter in itertools.chain(*self.buckets):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            return
        while len(self.running) < len(self.buckets):
            self._start_next()
        for gradients, reduced, work in self.running:
            # on a GPU the stream waits, and the host does not
            work.wait()
            reduced.mul_(1.0 / torch.distributed.get_world_size())
            if reduced is not gradients:
                gradients.copy_(reduced)
        self.running.clear()
        self.missing = [len(bucket) for bucket in self.buckets]

    def pause(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is reduced. A later `finish` reduces all."""
        return replace_attributes(self, is_paused=True)

    def remove(self) -> None:
        """Remove the hooks on the parameters."""
        for hook in self.hooks:
            hook.remove()

    def _count(self, number: int, _: Tensor) -> None:
        if self.is_paused or not self.due():
            return
        self.missing[number] -= 1
        while len(self.running) < len(self.buckets) and self.missing[len(self.running)] == 0:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self.buckets[len(self.running)]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        gradients = torch.cat([part.reshape(-1) for part in parts]) if len(parts) > 1 else parts[0].reshape(-1)
        # the gradients become views, so that the memory of the originals is free during the rest of the backward pass
        for parameter, view in zip(bucket, gradients.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = view.view_as(parameter)
        reduced = gradients.to(self.dtype)
        work = torch.distributed.all_reduce(reduced, group=reduction_group(bucket[0]), async_op=True)
        self.running.append(Reduction(gradients, reduced, work))


def buckets_of(parameters: Iterable[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Return the trainable parameters in buckets of one dtype, in reverse order. Spread experts have separate buckets.

    This is roughly the order in which the backward pass computes their gradients. size: the maximum number of
    elements of a bucket that has more than one parameter.
    """
    buckets: list[list[nn.Parameter]] = []
    elements = 0
    for parameter in reversed([parameter for parameter in parameters if parameter.requires_grad]):
        elements += parameter.numel()
        if not buckets or elements > size or _key(parameter) != _key(buckets[-1][-1]):
            buckets.append([])
            elements = parameter.numel()
        buckets[-1].append(parameter)
    # after parameters of odd sizes, all others would be misaligned
    return [sorted(bucket, key=lambda p: p.numel() * p.element_size() % ALIGNMENT > 0) for bucket in buckets]


class StepGuard:
    """Makes `optimizer.step` clip by the global gradient norm, and skip the update if that norm is not finite.

    At ZeRO stage 0 DeepSpeed does not check gradients, but reads `overflow` and `_global_grad_norm` of the optimizer,
    which its own optimizers set at the higher stages. With this guard, ZeRO 0 sets them too.

    nll: a number on the device that is read together with the norm, so that the host waits once per step; None: there
    is none. skip: a truth value on the device, whether to skip the update on all ranks; None: it is not skipped.
    read_nll: the number, after the step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm: Callable[[list[nn.Parameter]], Tensor] = total_norm,
    ) -> None:
        """norm: given the parameters of this rank, returns the norm of the gradient of the whole model."""
        self.optimizer, self.max_norm, self.update, self.norm = optimizer, max_norm, optimizer.step, norm
        self.nll: Tensor | None = None
        self.skip: Tensor | None = None
        self.read_nll = math.nan
        optimizer.step = self.step  # type: ignore[method-assign, assignment]

    def step(self, *_: Any) -> None:
        """Clip and update."""
        optimizer: Any = self.optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = self.norm(parameters)
        nll = torch.full_like(norm, math.nan) if self.nll is None else self.nll
        numbers = torch.stack([x.double() for x in (norm, is_invalid(norm, self.skip), nll)])
        norm_read, overflow, self.read_nll = numbers.tolist()
        optimizer.overflow = bool(overflow)
        optimizer._global_grad_norm = math.inf if overflow else norm_read
        if not overflow:
            self.clip(parameters, norm)
            self.update()

    def clip(self, parameters: list[nn.Parameter], norm: Tensor) -> None:
        """Scale the gradients by max_norm / norm if that is below 1. On a GPU, fused AdamW does it as it reads them."""
        if self.max_norm <= 0:
            return
        if parameters[0].is_cuda and isinstance(self.optimizer, AdamW) and self.optimizer.defaults["fused"]:
            # AdamW divides by it; the same small number as in clip_grads_with_norm_ guards against a norm of 0
            self.optimizer.grad_scale = ((norm + 1e-6) / self.max_norm).clamp(min=1.0).float()  # type: ignore[attr-defined]
        else:
            nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)


def agree_on_bf16_norm(device: torch.device) -> None:
    """Let DeepSpeed's optimizer for bf16 at ZeRO 1 ask all ranks whether the norm of the gradient is finite."""
    from deepspeed.runtime import bf16_optimizer

    # with experts the norm is a number
    bf16_optimizer.is_invalid_grad_norm = lambda norm: bool(is_invalid(torch.as_tensor(norm, device=device)))


def is_invalid(norm: Tensor, skip: Tensor | None = None) -> Tensor:
    """Return whether the norm of a gradient is not finite, is -1, as DeepSpeed marks it, or `skip` is true on any rank.

    Collective.
    """
    invalid = ~torch.isfinite(norm) | (norm < 0)
    if skip is not None:
        invalid = invalid | skip
    if torch.distributed.get_world_size() > 1:
        invalid = invalid.int()
        torch.distributed.all_reduce(invalid, op=torch.distributed.ReduceOp.MAX)
    return invalid.bool()


def _key(parameter: nn.Parameter) -> tuple[torch.dtype, bool]:
    """Return the properties that all parameters of a bucket share."""
    return parameter.dtype, spread_of(parameter) is None
