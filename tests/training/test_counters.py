"""Counters in the parameter groups of an optimizer, as DeepSpeed's ZeRO 3 calls `step`."""

from typing import Any

import torch
from torch import nn

from depthlm.training.engine.counters import count_updates


class Counting(torch.optim.Optimizer):
    """Counts its steps in each group, and moves each parameter by the count."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                parameter.add_(group["step"])


def test_the_parts_of_a_group_are_counted_as_one_update() -> None:
    parts = [[nn.Parameter(torch.zeros(1)) for _ in range(count)] for count in (3, 1)]
    optimizer = Counting([{"params": params} for params in parts])
    count_updates(optimizer)
    for group in optimizer.param_groups:
        group["params"] = []
    for update in range(1, 4):
        for group, params in zip(optimizer.param_groups, parts, strict=True):
            for part in params:
                group["params"] = [part]
                optimizer.step()
                group["params"] = []
        assert [group["step"] for group in optimizer.param_groups] == [update, update]
    assert [part.item() for params in parts for part in params] == [1 + 2 + 3] * 4
