"""One optimizer for all parameters, grouped as their modules say, and guarded against bad numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from depthlm.config.schema import Optimizer as OptimizerConfig
from depthlm.model import optimizer_groups


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW, or Muon on the hidden matrices with AdamW on the rest. Each group keeps its `lr_scale`."""
    groups = optimizer_groups(model, config.weight_decay)
    if config.name == "muon":
        return MuonAndAdamW(groups, config)
    for group in groups:
        group["lr"] = config.lr * group["lr_scale"]
    return torch.optim.AdamW(groups, **_adamw(config))


def _adamw(config: OptimizerConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": tuple(config.betas), "eps": config.eps, "fused": True}


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for groups of hidden matrices and its AdamW for all others, as one optimizer.

    Muon's update is scaled to the RMS of AdamW's (arXiv 2502.16982, section 2.2), so both share one learning rate.
    Both parts work on this optimizer's own groups and state: saving and loading need nothing beyond the base class.
    """

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig) -> None:
        self.parts: dict[str, torch.optim.Optimizer] = {}
        matrices = [group for group in groups if group["kind"] == "matrix"]
        others = [group for group in groups if group["kind"] != "matrix"]
        muon = torch.optim.Muon(
            matrices, lr=config.lr, momentum=config.momentum, ns_steps=config.ns_steps, adjust_lr_fn="match_rms_adamw"
        )
        adamw = torch.optim.AdamW(others, **_adamw(config))
        super().__init__([*muon.param_groups, *adamw.param_groups], {"lr": config.lr})
        self.parts = {"muon": muon, "adamw": adamw}
        for group in self.param_groups:
            group["lr"] = config.lr * group["lr_scale"]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every group."""
        for name, part in self.parts.items():
            part.state = self.state
            part.param_groups = [
                group for group in self.param_groups if (group["kind"] == "matrix") == (name == "muon")
            ]
            part.step()


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group its share of the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def guard_step(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    """Make `optimizer.step` clip by the whole gradient's norm, and do nothing where that norm is not finite.

    At ZeRO stage 0 DeepSpeed checks nothing itself, but reads `overflow` and `_global_grad_norm` off the optimizer, as
    its own optimizers of the higher stages set them; so every stage answers alike.
    """
    update = optimizer.step

    def step(*arguments: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        optimizer._global_grad_norm = float(norm)  # type: ignore[attr-defined]
        optimizer.overflow = not torch.isfinite(norm).item()  # type: ignore[attr-defined]
        if not optimizer.overflow:  # type: ignore[attr-defined]
            if max_norm > 0:
                nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
            update()

    optimizer.step = step  # type: ignore[method-assign, assignment]
