"""A second engine: plain PyTorch in fp32, in one process. It shows what an engine must provide."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthlm.config import Config
from depthlm.model import Decoder, Loss, Observer
from depthlm.model.layer import UNOBSERVED
from depthlm.optimizers.build import build_optimizer
from depthlm.runs.checkpoints import STATE
from depthlm.training.engine import Engine
from depthlm.training.engine.interface import copy_to_cpu
from depthlm.training.engine.partitions import nonfinite
from depthlm.training.plan import Plan

FILE = "state.pt"


def build_plain_engine(config: Config, plan: Plan, model: Decoder) -> Engine:
    """Return an engine for a single rank, to be used in place of `depthlm.training.engine.build_engine`."""
    return PlainEngine(config, plan, model)


class PlainEngine:
    """Gradient accumulation, clipping and one optimizer. The methods are documented in `Engine`."""

    device = torch.device("cpu")
    fp16 = False
    loss_scale = 1.0

    def __init__(self, config: Config, plan: Plan, model: Decoder) -> None:
        self.model, self.accumulation, self.max_norm = model, plan.accumulation, config.training.gradient_clipping
        self.optimizer = build_optimizer(model, config.optimizer, plan.max_steps)
        self.micro_batches, self.norm, self.applied = 0, None, True

    def __call__(
        self, inputs: Tensor, targets: Tensor, observer: Observer = UNOBSERVED, seeds_b: Tensor | None = None
    ) -> Loss:
        return self.model(inputs, targets, observer=observer, seeds_b=seeds_b)

    def backward(self, loss: Tensor) -> None:
        (loss / self.accumulation).backward()

    def unreduced(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce(self) -> None:
        pass

    def step(self, nll: Tensor | None = None, skip: Tensor | None = None) -> float:
        self.micro_batches += 1
        if self.micro_batches % self.accumulation:
            return math.nan
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        self.norm, self.applied = norm.item(), bool(torch.isfinite(norm)) and not skip
        if self.applied:
            if self.max_norm > 0:
                nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return math.nan if nll is None else nll.item()

    def step_applied(self) -> bool:
        return self.applied

    def grad_norm(self) -> float | None:
        return self.norm

    def nonfinite(self) -> str | None:
        return nonfinite(self.model, self.optimizer, zero=None)

    def set_learning_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]

    def state(self, checkpoint: Path) -> dict[Path, Any]:
        content = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {checkpoint / STATE / FILE: content}

    def weights(self, keep: Callable[[str, Tensor], Tensor] = copy_to_cpu) -> dict[str, Tensor]:
        return {name: keep(name, tensor) for name, tensor in self.model.state_dict().items()}

    def evaluated(self) -> AbstractContextManager[None]:
        return nullcontext()

    def load_state(self, checkpoint: Path, saved_experts: int | None = None) -> None:
        content = torch.load(checkpoint / STATE / FILE)
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])

    def destroy(self) -> None:
        self.optimizer.zero_grad()
