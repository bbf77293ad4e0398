"""The kind of each parameter, the optimizer's parameter groups, and the initial values.

Each parameter has its own generator, seeded by the run's seed and the parameter's name. So parameters that two
mechanisms share start with the same values, regardless of the order of modules and of all other parameters.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthlm.model.attention.delta import DeltaAttention, GatedNorm, ShortConvolution
from depthlm.model.experts import Experts, Router, spread_of
from depthlm.model.layers import Embedding, Head, Norm
from depthlm.model.shape import Backbone

SETTINGS = ("weight_decay", "lr_scale")
# that draw initial values, each of which holds those of a parameter in fp32
THREADS = 4


class OwnedParameter(NamedTuple):
    """A parameter, its full name, the module that owns it, and its name in that module."""

    name: str
    parameter: nn.Parameter
    owner: nn.Module
    name_in_owner: str


class Factors(NamedTuple):
    """Factors of the initial values, learning rate, weight decay and epsilon of a parameter."""

    init: float = 1.0
    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0

    def scaled(self, c: float) -> "Factors":
        """Return the factors of a parameter that includes the factor c of its output."""
        return Factors(self.init * c, self.lr * c, self.weight_decay / c, self.eps / c)


def factors_of(model: nn.Module, name: str) -> Factors:
    """Return the factors of a parameter of a decoder, which are 1 in the standard parametrization."""
    return getattr(model, "factors", {}).get(name, Factors())


def owned_parameters(model: nn.Module) -> Iterator[OwnedParameter]:
    """Yield every parameter once, with its owner."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield OwnedParameter(f"{path}.{name}" if path else name, parameter, module, name)


def shape_of(weight: Tensor) -> torch.Size:
    """Return the shape of a whole weight; one that DeepSpeed has sharded has no elements."""
    if (spread := spread_of(weight)) is not None:
        return torch.Size((spread.ranks * weight.shape[0], *weight.shape[1:]))
    return getattr(weight, "ds_shape", weight.shape)


def part_of(weight: Tensor, whole: Tensor) -> Tensor:
    """Return the part of a tensor of `shape_of(weight)` that the weight has: some experts if they are spread."""
    spread = spread_of(weight)
    return whole if spread is None else spread.share_of(whole)


def kind_of(owned: OwnedParameter) -> str:
    """Return the kind of a parameter.

    embedding: the token embedding and the matrix of the head. matrix: the weight of a linear layer or router. experts:
    the stacked matrices of experts. vector: norms, biases, and all else of a delta attention. mechanism: all other
    parameters of a depth mechanism.
    """
    if isinstance(owned.owner, Embedding | Head | nn.Embedding):
        return "embedding" if owned.name_in_owner == "weight" else "vector"
    if isinstance(owned.owner, Experts):
        return "experts"
    if isinstance(owned.owner, nn.Linear | Router):
        return "matrix" if owned.name_in_owner == "weight" else "vector"
    return "vector" if isinstance(owned.owner, Norm | DeltaAttention | GatedNorm | ShortConvolution) else "mechanism"


def group_of(name: str, kind: str) -> str:
    """Return the group of `optimizer.groups` of a parameter by its name and kind.

    All parameters of connections belong to the mechanism, also their matrices, which Muon may optimize, and norms.
    """
    if name.startswith("connections."):
        return "mechanism"
    if name == "head.weight":
        return "head"
    return "matrix" if kind == "experts" else kind


def fp32_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return, by name, the parameters that stay in fp32 in a model of 16 bits. A module declares its own:

        fp32_parameters = ("gate", "bias")

    Raises: ValueError if it declares an unknown one.
    """
    declared = {}
    for path, module in model.named_modules():
        direct = dict(module.named_parameters(recurse=False))
        for name in getattr(module, "fp32_parameters", ()):
            if name not in direct:
                where = f"{type(module).__name__}.fp32_parameters[{name!r}]"
                raise ValueError(f"{where}: no such parameter; there are {', '.join(direct) or 'none'}")
            declared[f"{path}.{name}" if path else name] = direct[name]
    return declared


def optimizer_groups(
    model: nn.Module, weight_decay: float, overrides: Mapping[str, tuple[float | None, float]] | None = None
) -> list[dict[str, Any]]:
    """Return the groups {params, names, weight_decay, lr_scale, eps_scale, kind}, with each trained parameter in one.

    kind: see `kind_of`; Muon may optimize those of kinds "matrix" and "experts". weight_decay: the argument for
    parameters with two or more dimensions, else 0. lr_scale, eps_scale: 1. A module overrides weight_decay and lr_scale
    for its own and its children's parameters:

        optimizer_settings = {"query": {"weight_decay": 0.0}, "gate.weight": {"lr_scale": 0.1}}

    overrides: by `group_of`, the weight decay of all its parameters (None: as above), and a further factor of lr_scale.
    Both and epsilon are those of the base size, which the factors of a parametrization multiply.

    Raises: ValueError if `optimizer_settings` names an unknown parameter of that module, or an unknown setting.
    """
    settings, overrides = _read_declared(model), overrides or {}
    groups: dict[tuple[str, float, float, float], dict[str, Any]] = {}
    for owned in owned_parameters(model):
        if not owned.parameter.requires_grad:
            continue
        group_settings = settings.get(owned.name, {})
        kind = kind_of(owned)
        of_kind, factor = overrides.get(group_of(owned.name, kind), (None, 1.0))
        decay = group_settings.get("weight_decay", weight_decay if len(shape_of(owned.parameter)) >= 2 else 0.0)
        factors = factors_of(model, owned.name)
        decay = (decay if of_kind is None else of_kind) * factors.weight_decay
        key = kind, decay, group_settings.get("lr_scale", 1.0) * factor * factors.lr, factors.eps
        shared = dict(zip(("kind", "weight_decay", "lr_scale", "eps_scale"), key, strict=True))
        group = groups.setdefault(key, {"params": [], "names": [], **shared})
        group["params"].append(owned.parameter)
        group["names"].append(owned.name)
    return list(groups.values())


def _read_declared(model: nn.Module) -> dict[str, dict[str, float]]:
    declared: dict[str, dict[str, float]] = {}
    for path, module in model.named_modules():
        names = dict(module.named_parameters())
        for name, settings in getattr(module, "optimizer_settings", {}).items():
            where = f"{type(module).__name__}.optimizer_settings[{name!r}]"
            if name not in names:
                raise ValueError(f"{where}: no such parameter; there are {', '.join(names) or 'none'}")
            if unknown := set(settings) - set(SETTINGS):
                raise ValueError(f"{where}: {', '.join(sorted(unknown))} not known; allowed: {', '.join(SETTINGS)}")
            declared[f"{path}.{name}" if path else name] = settings
    return declared


@torch.no_grad()
def initialize(
    model: nn.Module,
    seed: int,
    std: float,
    place: Callable[[OwnedParameter, Tensor], object] | None = None,
    backbone: Backbone | None = None,
) -> None:
    """Initialize every parameter. Values are drawn on the CPU in fp32, so no device or dtype changes them.

    Matrices and embeddings: as `backbone.init` says, by default normal(0, std). Norm weights: 1. Biases: normal with
    `backbone.bias_init_std`, those of norms 0. Any other module that owns parameters must define

        def init_parameter(self, name, tensor, generator, std): ...

    It is called for each parameter that the module itself owns, with the parameter's name in that module and with a CPU
    fp32 tensor of zeros, to fill in place. Several threads may call it at once.

    place: gives a parameter its values, of which one parameter's exist at a time. None: THREADS threads copy them into
    the parameters, so allocate a model on the meta device with `model.to_empty(device=...)` first. Buffers become zero.

    Raises: TypeError if a module owns parameters and does not define `init_parameter`.
    """

    def draw(owned: OwnedParameter) -> Tensor:
        factor = factors_of(model, owned.name).init
        return _initial_values(owned, generator_for(seed, owned.name), std, backbone or Backbone(), factor)

    # a mode of one thread does not apply to others
    @torch.no_grad()
    def fill(owned: OwnedParameter) -> None:
        owned.parameter.copy_(draw(owned))

    parameters = list(owned_parameters(model))
    if place is None:
        with ThreadPoolExecutor(THREADS) as pool:
            # an exception is raised where its result is read
            list(pool.map(fill, parameters))
    else:
        for owned in parameters:
            place(owned, draw(owned))
    for buffer in model.buffers():
        buffer.zero_()


def generator_for(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator that depends only on (seed, name)."""
    return torch.Generator("cpu").manual_seed(seed_for(seed, name))


def seed_for(seed: int, name: str) -> int:
    """Return a seed in [0, 2^63) for one use of a run's seed, such as a parameter or a step."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _initial_values(
    owned: OwnedParameter, generator: torch.Generator, std: float, backbone: Backbone, factor: float
) -> Tensor:
    module, name = owned.owner, owned.name_in_owner
    tensor = torch.zeros(owned.parameter.shape, dtype=torch.float32, device="cpu")
    # see Connection.output_gain
    gain = getattr(module, "init_gain", 1.0)
    init_parameter = getattr(module, "init_parameter", None)
    if init_parameter is not None:
        # constants of a mechanism's definition have no factor
        init_parameter(name, tensor, generator, gain * factor * std)
        return tensor
    if not isinstance(module, nn.Linear | nn.Embedding | Norm | Head | Embedding | Router | Experts):
        class_name = type(module).__name__
        raise TypeError(
            f"{owned.name}: {class_name} owns this parameter and has no init_parameter(name, tensor, generator, std)"
        )
    elif isinstance(module, Norm):
        tensor.fill_(1.0 if name == "weight" else 0.0)
    elif tensor.dim() == 1:
        tensor.normal_(0, backbone.bias_init_std, generator=generator)
    elif isinstance(module, Embedding):
        _draw(tensor, generator, module.init_std or std, backbone.init.replace("xavier_uniform", "normal"))
    else:
        _draw(tensor, generator, gain * std, backbone.init, gain)
        # of latent attention: the rows of each head are those of its key, then those of its value
        heads, value_gain = getattr(module, "init_value_gain", (1, 1.0))
        if value_gain != 1.0:
            tensor.view(heads, 2, -1)[:, 1].mul_(value_gain)
    return tensor if factor == 1.0 else tensor.mul_(factor)


def _draw(tensor: Tensor, generator: torch.Generator, std: float, distribution: str, gain: float = 1.0) -> None:
    if distribution == "truncated_normal":
        nn.init.trunc_normal_(tensor, 0, std, -3 * std, 3 * std, generator=generator)
    elif distribution == "xavier_uniform":
        bound = gain * math.sqrt(6 / (tensor.shape[-1] + tensor.shape[-2]))
        tensor.uniform_(-bound, bound, generator=generator)
    else:
        tensor.normal_(0, std, generator=generator)
