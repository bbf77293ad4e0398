"""One optimizer for all parameters, of the class that the configuration names, and the memory of its states."""

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from depthlm.errors import UserError
from depthlm.model import optimizer_groups

if TYPE_CHECKING:
    from depthlm.config.schema import Optimizer as OptimizerConfig

# keys of the group `optimizer` that the class receives if it has an argument of that name
SHARED = ("betas", "eps", "momentum", "ns_steps")


def build_optimizer(model: nn.Module, config: "OptimizerConfig") -> torch.optim.Optimizer:
    """Return the optimizer of a model's parameters. Raises UserError if its class refuses the settings."""
    return _optimizer(optimizer_groups(model, config.weight_decay), config)


def optimizer_class(config: "OptimizerConfig") -> type[torch.optim.Optimizer]:
    """Return the class of the optimizer."""
    module, _, name = config._target_.rpartition(".")
    return getattr(importlib.import_module(module), name)


def arguments(config: "OptimizerConfig") -> dict[str, Any]:
    """Return the arguments of the class, besides the parameter groups."""
    values = {name: getattr(config, name) for name in SHARED} | {"betas": tuple(config.betas)}
    accepted = inspect.signature(optimizer_class(config)).parameters
    shared = {name: value for name, value in values.items() if name in accepted and value is not None}
    return {"lr": config.lr, **shared, **config.settings}


def needs_matrices(config: "OptimizerConfig") -> bool:
    """Return whether the class needs parameters in their shapes; ZeRO 1 and above shard them as flat vectors."""
    return getattr(optimizer_class(config), "needs_matrices", False)


def state_bytes(model: nn.Module, config: "OptimizerConfig") -> int:
    """Return the bytes of the optimizer's states for unsharded fp32 parameters.

    Makes a step on fake tensors, which have no memory. The state of a parameter must depend only on its group and
    shape, since one parameter of each group and shape is counted for all. Raises what the class raises.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    counts: dict[Any, int] = {}
    with FakeTensorMode():
        groups = optimizer_groups(model, config.weight_decay)
        for group in groups:
            by_shape: dict[torch.Size, list[str]] = {}
            for name, parameter in zip(group["names"], group["params"], strict=True):
                by_shape.setdefault(parameter.shape, []).append(name)
            group["names"] = [names[0] for names in by_shape.values()]
            group["params"] = [nn.Parameter(torch.empty(shape, dtype=torch.float32)) for shape in by_shape]
            for parameter, names in zip(group["params"], by_shape.values(), strict=True):
                parameter.grad = torch.empty_like(parameter)
                counts[parameter] = len(names)
        optimizer = _optimizer(groups, config)
        optimizer.step()
    tensors = (
        (counts.get(key, 1), leaf)
        for key, state in optimizer.state.items()
        for leaf in tree_leaves(state)
        if isinstance(leaf, torch.Tensor)
    )
    return sum(count * tensor.numel() * tensor.element_size() for count, tensor in tensors)


def _optimizer(groups: list[dict[str, Any]], config: "OptimizerConfig") -> torch.optim.Optimizer:
    for group in groups:
        group["lr"] = config.lr * group["lr_scale"]
    try:
        return optimizer_class(config)(groups, **arguments(config))
    except (ValueError, TypeError) as error:
        keys = {entry.name for entry in fields(config)}
        lines = [
            f"optimizer.{'' if match[1] in keys else 'settings.'}{line}"
            if (match := re.match(r"(\w+)=", line))
            else f"optimizer: {config._target_}: {line}"
            for line in str(error).splitlines()
        ]
        raise UserError("\n".join(lines)) from None


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for the groups of hidden matrices and its AdamW for all others, as one optimizer.

    Muon's update is scaled to the RMS of AdamW's (arXiv 2502.16982, section 2.2), so both share one learning rate.
    Both parts use the groups and the state of this optimizer, so the base class saves and loads everything.
    """

    needs_matrices = True

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float = 0.95,
        ns_steps: int = 5,
    ) -> None:
        matrices = [group for group in groups if group["kind"] == "matrix"]
        others = [group for group in groups if group["kind"] != "matrix"]
        muon = torch.optim.Muon(matrices, lr, momentum=momentum, ns_steps=ns_steps, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(others, lr, betas, eps, fused=True)
        super().__init__([*muon.param_groups, *adamw.param_groups], {"lr": lr})
        self.parts: dict[str, torch.optim.Optimizer] = {"muon": muon, "adamw": adamw}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every group once."""
        for name, part in self.parts.items():
            part.state = self.state
            part.param_groups = [
                group for group in self.param_groups if (group["kind"] == "matrix") == (name == "muon")
            ]
            part.step()
