"""One optimizer for all parameters, grouped as their modules declare; it skips non-finite gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from depthlm.config.schema import Optimizer as OptimizerConfig
from depthlm.model import optimizer_groups


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return AdamW, or Muon for the hidden matrices with AdamW for the rest. Each group keeps its `lr_scale`."""
    groups = optimizer_groups(model, config.weight_decay)
    if config.name == "muon":
        return MuonAndAdamW(groups, config)
    for group in groups:
        group["lr"] = config.lr * group["lr_scale"]
    return torch.optim.AdamW(groups, **_adamw(config))


def _adamw(config: OptimizerConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": tuple(config.betas), "eps": config.eps, "fused": True}


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for the groups of hidden matrices and its AdamW for all others, as one optimizer.

    Muon's update is scaled to the RMS of AdamW's (arXiv 2502.16982, section 2.2), so both share one learning rate.
    Both parts use the groups and the state of this optimizer, so the base class saves and loads everything.
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
        """Update every group once."""
        for name, part in self.parts.items():
            part.state = self.state
            part.param_groups = [
                group for group in self.param_groups if (group["kind"] == "matrix") == (name == "muon")
            ]
            part.step()


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to `lr` times its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def guard_step(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    """Make `optimizer.step` clip by the global gradient norm, and skip the update if that norm is not finite.

    At ZeRO stage 0 DeepSpeed does not check gradients, but reads `overflow` and `_global_grad_norm` of the optimizer,
    which its own optimizers set at the higher stages. With this guard every stage reports the same.
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
