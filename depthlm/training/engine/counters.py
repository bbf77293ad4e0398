"""Optimizers that count their updates in their parameter groups, at ZeRO 3.

DeepSpeed calls `step` once for every part of a group there, each time with all groups, of which only one has
parameters. Counters in the groups, as those of pytorch_optimizer, would count every call.
"""

from typing import Any

import torch
from torch import Tensor


def count_updates(optimizer: torch.optim.Optimizer) -> None:
    """Make `optimizer.step` ignore groups without parameters, and count the parts of a group as one update."""
    update = optimizer.step
    # by group, its entries before the update in progress, and the parts that have been updated since
    before: dict[int, dict[str, Any]] = {}
    updated: dict[int, list[Tensor]] = {}

    def step(*_: Any) -> None:
        groups = optimizer.param_groups
        for number, group in enumerate(groups):
            if not group["params"]:
                continue
            (part,) = group["params"]
            if number not in updated or any(part is other for other in updated[number]):
                before[number], updated[number] = {k: v for k, v in group.items() if k != "params"}, []
            elif updated[number]:
                for key in group.keys() - before[number].keys() - {"params"}:
                    del group[key]
                group |= before[number]
            updated[number].append(part)
            optimizer.param_groups = [group]
            update()
        optimizer.param_groups = groups

    optimizer.step = step  # type: ignore[method-assign, assignment]
