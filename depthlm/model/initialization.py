"""How the weights start: each parameter from its own generator, seeded by the run's seed and the parameter's name.

So whatever two mechanisms share starts the same, in any order of modules and beside any other parameters.
"""

import hashlib

import torch
from torch import Tensor, nn

from depthlm.model.layers import Head, Norm


@torch.no_grad()
def initialize(model: nn.Module, seed: int, std: float) -> None:
    """Fills every parameter, in place; drawn on the CPU in fp32, so the same on every device and in every type.

    Matrices and embeddings: normal(0, std). Norm weights: 1. Biases: 0. A module of another kind that owns parameters
    says how they start:

        def init_parameter(self, name, tensor, generator, std): ...

    called for each parameter of its own, under its name in that module, with a CPU fp32 tensor to fill in place.

    A model made on the meta device is first given memory with `model.to_empty(device=...)`.

    Raises: TypeError when a module owns parameters and does not say how they start.
    """
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{path}.{name}" if path else name
            tensor = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
            _fill(module, name, full_name, tensor, generator_for(seed, full_name), std)
            parameter.copy_(tensor)


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on (seed, name) alone."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _fill(module: nn.Module, name: str, full_name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
    init_parameter = getattr(module, "init_parameter", None)
    if init_parameter is not None:
        init_parameter(name, tensor, generator, std)
    elif not isinstance(module, nn.Linear | nn.Embedding | Norm | Head):
        kind = type(module).__name__
        raise TypeError(
            f"{full_name}: {kind} owns this parameter and has no init_parameter(name, tensor, generator, std)"
        )
    elif isinstance(module, Norm):
        tensor.fill_(1.0 if name == "weight" else 0.0)
    elif name == "weight":
        tensor.normal_(0, std, generator=generator)
