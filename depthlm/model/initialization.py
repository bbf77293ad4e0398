"""Weight initialization: each parameter has its own generator, seeded by the run's seed and the parameter's name.

Parameters that two mechanisms share therefore get the same values, regardless of the order of modules and of all other
parameters.
"""

import hashlib

import torch
from torch import Tensor, nn

from depthlm.model.layers import Head, Norm


@torch.no_grad()
def initialize(model: nn.Module, seed: int, std: float) -> None:
    """Initialize every parameter in place. Values are drawn on the CPU in fp32, so no device or dtype changes them.

    Matrices and embeddings: normal(0, std). Norm weights: 1. Biases: 0. Any other module that owns parameters must
    define

        def init_parameter(self, name, tensor, generator, std): ...

    It is called for each parameter that the module itself owns, with the parameter's name in that module and with a CPU
    fp32 tensor of zeros, to fill in place.

    Allocate a model on the meta device with `model.to_empty(device=...)` first.

    Raises: TypeError if a module owns parameters and does not define `init_parameter`.
    """
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{path}.{name}" if path else name
            tensor = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
            _fill(module, name, full_name, tensor, generator_for(seed, full_name), std)
            parameter.copy_(tensor)


def generator_for(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator that depends only on (seed, name)."""
    return torch.Generator("cpu").manual_seed(seed_for(seed, name))


def seed_for(seed: int, name: str) -> int:
    """Return a seed in [0, 2^63) for one use of a run's seed, such as a parameter or a step."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _fill(module: nn.Module, name: str, full_name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
    init_parameter = getattr(module, "init_parameter", None)
    if init_parameter is not None:
        init_parameter(name, tensor, generator, std)
    elif not isinstance(module, nn.Linear | nn.Embedding | Norm | Head):
        class_name = type(module).__name__
        raise TypeError(
            f"{full_name}: {class_name} owns this parameter and has no init_parameter(name, tensor, generator, std)"
        )
    elif isinstance(module, Norm):
        tensor.fill_(1.0 if name == "weight" else 0.0)
    elif name == "weight":
        tensor.normal_(0, std, generator=generator)
