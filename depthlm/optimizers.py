"""One optimizer for all parameters, of the class that the configuration names, and the memory of its states."""

import importlib
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
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
    Each matrix of stacked experts gets the update that torch's Muon, which refuses stacks, would make of it alone.
    All parts use the groups and the state of this optimizer, so the base class saves and loads everything.
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
        experts = [group for group in groups if group["kind"] == "experts"]
        others = [group for group in groups if group["kind"] not in ("matrix", "experts")]
        muon = torch.optim.Muon(matrices, lr, momentum=momentum, ns_steps=ns_steps, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(others, lr, betas, eps, fused=True)
        experts = [muon.defaults | group for group in experts]
        super().__init__([*muon.param_groups, *experts, *adamw.param_groups], {"lr": lr})
        self.parts: dict[str, torch.optim.Optimizer] = {"matrix": muon, "others": adamw}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every group once."""
        groups: dict[str, list[dict[str, Any]]] = {"matrix": [], "experts": [], "others": []}
        for group in self.param_groups:
            groups[group["kind"] if group["kind"] in groups else "others"].append(group)
        for kind, part in self.parts.items():
            part.state, part.param_groups = self.state, groups[kind]
            part.step()
        for group in groups["experts"]:
            self._update_experts(group)

    def _update_experts(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
            update = orthogonalized(
                parameter.grad.lerp(momentum, group["momentum"]),
                group["ns_coefficients"],
                group["ns_steps"],
                group["eps"],
            )
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-0.2 * math.sqrt(max(parameter.shape[1:])) * group["lr"])


def orthogonalized(stack_emn: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return the matrices of a stack [e, m, n] with singular values of about 1, in bf16.

    Newton-Schulz iterations as in torch.optim.Muon, of all matrices at once and of each by itself.
    """
    a, b, c = coefficients
    tall = stack_emn.shape[1] > stack_emn.shape[2]
    # the smaller of the two Gram matrices
    x_ers = stack_emn.bfloat16().mT if tall else stack_emn.bfloat16()
    x_ers = x_ers / x_ers.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram_err = x_ers @ x_ers.mT
        x_ers = torch.baddbmm(x_ers, torch.baddbmm(gram_err, gram_err, gram_err, beta=b, alpha=c), x_ers, beta=a)
    return x_ers.mT if tall else x_ers
