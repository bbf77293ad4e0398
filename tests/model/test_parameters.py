from typing import ClassVar

import pytest
import torch
from torch import nn

from depthlm.model.parameters import optimizer_groups


@pytest.mark.parametrize("backbone", ["qwen3", "lm1b"])
def test_groups_cover_every_parameter_once(make_decoder, backbone):
    model = make_decoder(backbone)
    groups = optimizer_groups(model, 0.1)
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for group in groups:
        assert [id(p) for p in group["params"]] == [id(model.get_parameter(name)) for name in group["names"]]
        for name, parameter in zip(group["names"], group["params"], strict=True):
            assert group["weight_decay"] == (0.1 if parameter.ndim == 2 else 0.0), name
            kind = "vector" if parameter.ndim == 1 else "matrix" if name.startswith("layers") else "embedding"
            assert group["kind"] == kind, name
            assert group["lr_scale"] == 1.0
    torch.optim.AdamW(groups, lr=1e-3)


class Mechanism(nn.Module):
    optimizer_settings: ClassVar = {"query": {"weight_decay": 0.0}, "gate.weight": {"lr_scale": 0.1}}

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.zeros(4, 4))
        self.other = nn.Parameter(torch.zeros(4, 4))
        self.gate = nn.Linear(4, 4)


def test_a_module_overrides_optimizer_settings_and_settings_of_a_group_come_after_them():
    def settings(groups):
        return {n: (g["kind"], g["weight_decay"], g["lr_scale"]) for g in groups for n in g["names"]}

    assert settings(optimizer_groups(nn.Sequential(Mechanism(), nn.Linear(2, 2)), 0.1)) == {
        "0.query": ("mechanism", 0.0, 1.0),
        "0.other": ("mechanism", 0.1, 1.0),
        "0.gate.weight": ("matrix", 0.1, 0.1),
        "0.gate.bias": ("vector", 0.0, 1.0),
        "1.weight": ("matrix", 0.1, 1.0),
        "1.bias": ("vector", 0.0, 1.0),
    }
    model = nn.ModuleDict({"connections": nn.Sequential(Mechanism()), "layer": nn.Linear(2, 2)})
    of_groups = {"mechanism": (0.3, 2.0), "vector": (0.2, 1.0), "matrix": (None, 0.5)}
    assert settings(optimizer_groups(model, 0.1, of_groups)) == {
        "connections.0.query": ("mechanism", 0.3, 2.0),
        "connections.0.other": ("mechanism", 0.3, 2.0),
        "connections.0.gate.weight": ("matrix", 0.3, 0.2),
        "connections.0.gate.bias": ("vector", 0.3, 2.0),
        "layer.weight": ("matrix", 0.1, 0.5),
        "layer.bias": ("vector", 0.2, 1.0),
    }
