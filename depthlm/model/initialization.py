"""Weight initialization: each parameter has its own generator, seeded by the run's seed and the parameter's name.

Parameters that two mechanisms share therefore get the same values, regardless of the order of modules and of all other
parameters.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from depthlm.model.layers import Head, Norm
from depthlm.model.parameters import Owned, owned_parameters


def _copy(owned: Owned, tensor: Tensor) -> None:
    owned.parameter.copy_(tensor)


@torch.no_grad()
def initialize(model: nn.Module, seed: int, std: float, place: Callable[[Owned, Tensor], None] = _copy) -> None:
    """Initialize every parameter. Values are drawn on the CPU in fp32, so no device or dtype changes them.

    Matrices and embeddings: normal(0, std). Norm weights: 1. Biases: 0. Any other module that owns parameters must
    define

        def init_parameter(self, name, tensor, generator, std): ...

    It is called for each parameter that the module itself owns, with the parameter's name in that module and with a CPU
    fp32 tensor of zeros, to fill in place.

    place: gives a parameter its values; by default it copies them into the parameter, so allocate a model on the meta
    device with `model.to_empty(device=...)` first. Only one parameter's values exist at a time. Buffers become zero.

    Raises: TypeError if a module owns parameters and does not define `init_parameter`.
    """
    for owned in list(owned_parameters(model)):
        place(owned, _drawn(owned, generator_for(seed, owned.name), std))
    for buffer in model.buffers():
        buffer.zero_()


def generator_for(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator that depends only on (seed, name)."""
    return torch.Generator("cpu").manual_seed(seed_for(seed, name))


def seed_for(seed: int, name: str) -> int:
    """Return a seed in [0, 2^63) for one use of a run's seed, such as a parameter or a step."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _drawn(owned: Owned, generator: torch.Generator, std: float) -> Tensor:
    module, name = owned.owner, owned.own_name
    tensor = torch.zeros(owned.parameter.shape, dtype=torch.float32, device="cpu")
    init_parameter = getattr(module, "init_parameter", None)
    if init_parameter is not None:
        init_parameter(name, tensor, generator, std)
    elif not isinstance(module, nn.Linear | nn.Embedding | Norm | Head):
        class_name = type(module).__name__
        raise TypeError(
            f"{owned.name}: {class_name} owns this parameter and has no init_parameter(name, tensor, generator, std)"
        )
    elif isinstance(module, Norm):
        tensor.fill_(1.0 if name == "weight" else 0.0)
    elif name == "weight":
        tensor.normal_(0, std, generator=generator)
    return tensor
