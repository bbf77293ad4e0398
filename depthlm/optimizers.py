"""One optimizer for all parameters, of the class that the configuration names, and the memory of its states."""

import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from depthlm.errors import UserError
from depthlm.model import optimizer_groups

if TYPE_CHECKING:
    from depthlm.config.schema import Optimizer as OptimizerConfig

# keys of the group `optimizer` that the class receives if it has an argument of that name
SHARED = ("betas", "eps", "momentum", "ns_steps")
# the value of a setting that receives the number of steps of the run
RUN_STEPS = "run_steps"
# the kinds of parameters that Muon optimizes, and the constants of torch.optim.Muon
MATRICES = ("matrix", "experts")
COEFFICIENTS, SMALLEST_NORM, DTYPE = (3.4445, -4.7750, 2.0315), 1e-7, torch.bfloat16


def build_optimizer(model: nn.Module, config: "OptimizerConfig", run_steps: int = 1) -> torch.optim.Optimizer:
    """Return the optimizer of a model's parameters. Raises UserError if its class refuses the settings.

    run_steps: the steps of the run, for settings that are RUN_STEPS.
    """
    return _optimizer(optimizer_groups(model, config.weight_decay), config, run_steps)


def optimizer_class(config: "OptimizerConfig") -> type[torch.optim.Optimizer]:
    """Return the class of the optimizer."""
    module, _, name = config._target_.rpartition(".")
    return getattr(importlib.import_module(module), name)


def arguments(config: "OptimizerConfig", run_steps: int = 1) -> dict[str, Any]:
    """Return the arguments of the class, besides the parameter groups."""
    values = {name: getattr(config, name) for name in SHARED} | {"betas": tuple(config.betas)}
    accepted = inspect.signature(optimizer_class(config)).parameters
    shared = {name: value for name, value in values.items() if name in accepted and value is not None}
    settings = {name: run_steps if value == RUN_STEPS else value for name, value in config.settings.items()}
    return {"lr": config.lr, **shared, **settings}


def averages_weights(config: "OptimizerConfig") -> bool:
    """Return whether averages of the weights are evaluated, which `eval()` of the optimizer sets, `train()` undoes."""
    return hasattr(optimizer_class(config), "eval")


def needs_matrices(config: "OptimizerConfig") -> bool:
    """Return whether the class needs whole matrices: by the configuration, or by its attribute `needs_matrices`."""
    return config.needs_matrices or getattr(optimizer_class(config), "needs_matrices", False)


def number_of_betas(config: "OptimizerConfig") -> int:
    """Return how many decay rates the class has, from its default."""
    parameter = inspect.signature(optimizer_class(config)).parameters.get("betas")
    default = parameter.default if parameter is not None else None
    return len(default) if isinstance(default, Sequence) else 2


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


def _optimizer(groups: list[dict[str, Any]], config: "OptimizerConfig", run_steps: int = 1) -> torch.optim.Optimizer:
    for group in groups:
        group["lr"] = config.lr * group["lr_scale"]
    try:
        return optimizer_class(config)(groups, **arguments(config, run_steps))
    except (ValueError, TypeError) as error:
        keys = {entry.name for entry in fields(config)}
        # a value of a type that the class does not handle
        given = f"; its settings are {config.settings}" if isinstance(error, TypeError) else ""
        lines = [
            f"optimizer.{'' if match[1] in keys else 'settings.'}{line}"
            if (match := re.match(r"(\w+)=", line))
            else f"optimizer: {config._target_}: {line}{given}"
            for line in str(error).splitlines()
        ]
        raise UserError("\n".join(lines)) from None


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the groups of hidden matrices and of experts, and torch's AdamW for all others, as one optimizer.

    Muon is that of torch.optim.Muon with adjust_lr_fn="match_rms_adamw" (arXiv 2502.16982, section 2.2): Nesterov
    momentum, orthogonalization in bf16, and updates of the RMS of AdamW's, so that both share one learning rate. Each
    matrix of stacked experts is updated as if it were alone.

    Momentum and weight decay are computed element by element, so a parameter may be a flat partition of matrices, as
    in ZeRO. split: what orthogonalizes the matrices of such a partition.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float = 0.95,
        ns_steps: int = 5,
    ) -> None:
        others = [group for group in groups if group["kind"] not in MATRICES]
        self.adamw = torch.optim.AdamW(others, lr, betas, eps, fused=True)
        for group in groups:
            if group["kind"] in MATRICES:
                group |= {"momentum": momentum, "ns_steps": ns_steps}
        super().__init__(groups, {"lr": lr})
        self.split: Mapping[Tensor, SplitMatrices] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every group once."""
        self.adamw.state = self.state
        self.adamw.param_groups = [group for group in self.param_groups if group["kind"] not in MATRICES]
        self.adamw.step()
        for group in self.param_groups:
            if group["kind"] in MATRICES:
                self._update_matrices(group)

    def _update_matrices(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
            update = parameter.grad.lerp(momentum, group["momentum"]).to(DTYPE)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            if parameter in self.split:
                parts = self.split[parameter].orthogonalized(update, group["ns_steps"])
            else:
                stack = update.view(-1, *update.shape[-2:])
                parts = [Orthogonalized(0, orthogonalized(stack, group["ns_steps"]).view_as(update), update.shape)]
            for part in parts:
                target = parameter.view(-1)[part.offset : part.offset + part.values.numel()].view_as(part.values)
                target.add_(part.values, alpha=-group["lr"] * 0.2 * math.sqrt(max(part.shape[-2:])))


class Orthogonalized(NamedTuple):
    """Orthogonalized elements of matrices of a shape [..., m, n]. offset: of the first in the flattened parameter."""

    offset: int
    values: Tensor
    shape: Sequence[int]


class SplitMatrices(Protocol):
    """The matrices of a flat partition, of which other ranks may have parts."""

    def orthogonalized(self, update: Tensor, steps: int) -> Iterable[Orthogonalized]:
        """Return the orthogonalized matrices of a flat update in DTYPE, as far as this rank has them; collective."""
        ...


def orthogonalized(stack_emn: Tensor, steps: int) -> Tensor:
    """Return the matrices of a stack [e, m, n] with singular values of about 1.

    Newton-Schulz iterations as in torch.optim.Muon, of all matrices at once and of each by itself.
    """
    a, b, c = COEFFICIENTS
    tall = stack_emn.shape[1] > stack_emn.shape[2]
    # the smaller of the two Gram matrices
    x_ers = stack_emn.mT if tall else stack_emn
    x_ers = x_ers / x_ers.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram_err = x_ers @ x_ers.mT
        x_ers = torch.baddbmm(x_ers, torch.baddbmm(gram_err, gram_err, gram_err, beta=b, alpha=c), x_ers, beta=a)
    return x_ers.mT if tall else x_ers
