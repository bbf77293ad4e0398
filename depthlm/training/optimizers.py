"""One optimizer for all parameters, grouped as their modules declare."""

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
