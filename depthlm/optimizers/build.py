"""One optimizer for all parameters, of the class that the configuration names, and the memory of its states."""

import importlib
import inspect
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from depthlm.errors import UserError
from depthlm.model import optimizer_groups
from depthlm.optimizers import Optimizer

# keys of the group `optimizer` that the class receives if it has an argument of that name
SHARED = ("betas", "eps", "momentum", "ns_steps")
# the value of a setting that receives the number of steps of the run
RUN_STEPS = "run_steps"


def build_optimizer(model: nn.Module, config: Optimizer, run_steps: int = 1) -> torch.optim.Optimizer:
    """Return the optimizer of a model's parameters. Raises UserError if its class refuses the settings.

    run_steps: the steps of the run, for settings that are RUN_STEPS.
    """
    return _optimizer(parameter_groups(model, config), config, run_steps)


def parameter_groups(model: nn.Module, config: Optimizer) -> list[dict[str, Any]]:
    """Return the groups of `depthlm.model.optimizer_groups`, with what the configuration sets for each."""
    given = {entry.name: getattr(config.groups, entry.name) for entry in fields(config.groups)}
    overrides = {name: (group.weight_decay, group.lr_scale) for name, group in given.items()}
    return optimizer_groups(model, config.weight_decay, overrides)


def optimizer_class(config: Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class of the optimizer."""
    module, _, name = config._target_.rpartition(".")
    return getattr(importlib.import_module(module), name)


def arguments(config: Optimizer, run_steps: int = 1) -> dict[str, Any]:
    """Return the arguments of the class, besides the parameter groups."""
    values = {name: getattr(config, name) for name in SHARED} | {"betas": tuple(config.betas)}
    accepted = inspect.signature(optimizer_class(config)).parameters
    shared = {name: value for name, value in values.items() if name in accepted and value is not None}
    settings = {name: run_steps if value == RUN_STEPS else value for name, value in config.settings.items()}
    return {"lr": config.lr, **shared, **settings}


def averages_weights(config: Optimizer) -> bool:
    """Return whether averages of the weights are evaluated: the optimizer sets them in `eval()`, not in `train()`."""
    return hasattr(optimizer_class(config), "eval")


def number_of_betas(config: Optimizer) -> int:
    """Return how many decay rates the class has, from its default."""
    parameter = inspect.signature(optimizer_class(config)).parameters.get("betas")
    default = parameter.default if parameter is not None else None
    return len(default) if isinstance(default, Sequence) else 2


def state_bytes(model: nn.Module, config: Optimizer) -> int:
    """Return the bytes of the optimizer's states for unsharded fp32 parameters.

    Makes a step on fake tensors, which have no memory. The state of a parameter must depend only on its group and
    shape, since one parameter of each group and shape is counted for all. Raises what the class raises.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    counts: dict[Any, int] = {}
    with FakeTensorMode():
        groups = parameter_groups(model, config)
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


def _optimizer(groups: list[dict[str, Any]], config: Optimizer, run_steps: int = 1) -> torch.optim.Optimizer:
    given = arguments(config, run_steps)
    for group in groups:
        group["lr"] = config.lr * group["lr_scale"]
        if group["eps_scale"] != 1.0:
            group["eps"] = given["eps"] * group["eps_scale"]
    try:
        return optimizer_class(config)(groups, **given)
    except (ValueError, TypeError) as error:
        keys = {entry.name for entry in fields(config)}
        # a TypeError may come from a value of a type that the class does not handle
        shown = f"; its settings are {config.settings}" if isinstance(error, TypeError) else ""
        lines = [
            f"optimizer.{'' if match[1] in keys else 'settings.'}{line}"
            if (match := re.match(r"(\w+)=", line))
            else f"optimizer: {config._target_}: {line}{shown}"
            for line in str(error).splitlines()
        ]
        raise UserError("\n".join(lines)) from None
