"""The weights of experts, which are stacked in three tensors here, and separate in the checkpoints of the hub."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

ONE = re.compile(r"(.+\.experts\.)(\d+)\.(\w+)\.weight")
STACKED = re.compile(r"(.+\.experts\.)(\w+)_proj")


def stack_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with those of experts stacked.

    Also splits `gate_up_proj`, as which transformers keeps the first two in memory. Raises ValueError if an expert is
    missing.
    """
    result, experts = dict[str, Tensor](), dict[str, dict[int, Tensor]]()
    for name, tensor in weights.items():
        if match := ONE.fullmatch(name):
            experts.setdefault(match[1] + match[3], {})[int(match[2])] = tensor
        elif (match := STACKED.fullmatch(name)) and match[2] == "gate_up":
            result |= dict(zip((f"{match[1]}gate_proj", f"{match[1]}up_proj"), tensor.chunk(2, 1), strict=True))
        else:
            result[name] = tensor
    for name, tensors in experts.items():
        if tensors.keys() != set(range(len(tensors))):
            raise ValueError(f"{name}: there are experts {', '.join(map(str, sorted(tensors)))}, and no others")
        result[name] = torch.stack([tensors[number] for number in range(len(tensors))])
    return result


def split_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with those of each expert by itself."""
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if match := STACKED.fullmatch(name):
            result |= {f"{match[1]}{number}.{match[2]}_proj.weight": one for number, one in enumerate(tensor)}
        else:
            result[name] = tensor
    return result
