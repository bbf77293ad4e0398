"""Checks of the decoder: its shape is valid, and its mechanism and its parametrization suit it."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hydra.utils import get_class

from depthlm.config.classes import factories, reads_across_layers
from depthlm.config.schema import Config
from depthlm.errors import join_names
from depthlm.model.shape import Backbone, Size, SublayerSpec

# the classes whose updates are like those of AdamW, for which the factors of a parametrization are known
LIKE_ADAMW = ("torch.optim.AdamW", "pytorch_optimizer.AdEMAMix", "pytorch_optimizer.ScheduleFreeAdamW")


def check_mechanism(config: Config) -> list[str]:
    """Return the mistakes that the mechanism reports when its first and last parts are built on the meta device."""
    import torch

    size, depth = config.size, config.model.loops * config.size.num_layers
    connection, attention = factories(config.model)
    # a setting, such as a number of layers, may be invalid only for a later layer or for the final read
    connected = [SublayerSpec(layer, kind, depth) for layer in (0, depth - 1) for kind in ("attention", "mlp")]
    connected.append(SublayerSpec(depth, "final", depth))
    mixers = [name for name in config.backbone.mixers_of(size.num_layers) if name != "delta"]
    attending = [
        SublayerSpec(i, "attention", len(mixers), config.model.loops, mixers[i])
        for i in sorted({0, len(mixers) - 1})
        if mixers
    ]
    parts: list[tuple[str, Callable[..., object], list[SublayerSpec]]] = [
        ("model.connection", connection, connected),
        ("model.attention", attention, attending),
    ]
    errors: list[str] = []
    with torch.device("meta"):
        for name, make, specs in parts:
            for spec in specs:
                try:
                    make(spec, size, config.backbone)
                except ValueError as error:
                    for line in str(error).splitlines():
                        errors.append(f"{name}.{line}" if re.match(r"\w+=", line) else f"{name}: {line}")
                except (TypeError, RuntimeError) as error:
                    # a value of a type that the class does not handle
                    settings = {k: v for k, v in getattr(config.model, name.split(".")[1]).items() if k != "_target_"}
                    errors.append(f"{name}: {str(error).splitlines()[0]}; its settings are {settings}")
    return list(dict.fromkeys(errors))


def check_parametrization(config: Config) -> list[str]:
    """Return the mistakes of a parametrization: without a base size, or where its factors are not known."""
    name, base = config.parametrization.name, config.parametrization.base_size
    shown = f"parametrization={name}: "
    if name == "standard":
        return [] if base is None else [f"{shown}has no base_size; give parametrization=mup or completep"]
    if base is None:
        return [f"{shown}give parametrization.base_size=<a size>, whose best learning rate is known"]
    errors = []
    if config.backbone.init == "xavier_uniform":
        errors.append(f"{shown}backbone.init=xavier_uniform follows the width; give normal or truncated_normal")
    if config.optimizer._target_ not in LIKE_ADAMW:
        errors.append(
            f"{shown}its factors are those of AdamW, and not of optimizer={config.optimizer.name}; allowed: adamw, "
            "ademamix, schedule_free"
        )
    assert isinstance(base, Size)
    narrow = replace(base, num_layers=config.size.num_layers)
    at_base = replace(config, size=narrow)
    errors += [f"parametrization.base_size={base.name}: {line}" for line in check_mechanism(at_base)]
    return errors or _check_depth(config, base)


def _check_depth(config: Config, base: Size) -> list[str]:
    """Return why the factor of the outputs of sublayers is not known, if it is not."""
    if config.parametrization.name != "completep":
        return []
    import torch

    from depthlm.optimizers.parametrization import count_summed_outputs

    connection, _ = factories(config.model)
    shown = f"parametrization=completep, parametrization.base_size={base.name}: "
    if (placement := config.backbone.norm_placement) != "pre":
        reason = "it needs a norm before each sublayer alone, as backbone.norm_placement=pre"
        return [
            f"{shown}not defined for backbone.norm_placement={placement}: {reason}; parametrization=mup needs no depth"
        ]
    try:
        with torch.device("meta"):
            count_summed_outputs(connection(SublayerSpec(0, "attention", base.num_layers), base, config.backbone))
    except ValueError as error:
        return [f"{shown}{line}; parametrization=mup needs no depth" for line in str(error).splitlines()]
    return []


def check_shape(config: Config) -> list[str]:
    """Return the mistakes in the shape of the decoder: its heads, experts and mixers."""
    size, backbone = config.size, config.backbone
    errors = check_divides("size.num_kv_heads", size.num_kv_heads, f"size.num_heads={size.num_heads}", size.num_heads)
    if backbone.position == "rope" and size.head_size % 2:
        errors.append(f"size.head_size={size.head_size}: RoPE rotates pairs; it must be even")
    if backbone.mlp == "experts":
        errors += _check_experts(size, backbone)
        if backbone.mlp_bias:
            errors.append("backbone.mlp_bias=true: experts have no biases; give backbone.mlp_bias=false")
    errors += _check_mixers(config)
    if backbone.dropout:
        errors += _check_dropout(config)
    return errors


def _check_dropout(config: Config) -> list[str]:
    attention: Any = get_class(config.model.attention["_target_"])
    shown, errors = f"backbone.dropout={config.backbone.dropout:g}: ", []
    if config.backbone.mlp == "experts":
        errors.append(f"{shown}experts have none; give backbone.mlp=swiglu or relu, or backbone.dropout=0")
    if not attention.has_dropout:
        errors.append(f"{shown}the attention of model={config.model.name} has none; give backbone.dropout=0")
    return errors


def _check_mixers(config: Config) -> list[str]:
    backbone, errors = config.backbone, []
    names = backbone.mixers_of(config.size.num_layers)
    if "latent" in names and backbone.position == "rope":
        errors.append("backbone.position=rope: the keys of mixer latent are not rotated; give backbone.position=none")
    shown = f"backbone.mixers=[{','.join(backbone.mixers)}]: "
    mechanism = f"the attention of model={config.model.name} may read keys and values of other layers, and"
    if reads_across_layers(config.model):
        if set(names) == {"delta"}:
            errors.append(f"{shown}{mechanism} no layer has any; give some layers attention or latent")
        elif {"attention", "latent"} <= set(names):
            errors.append(f"{shown}{mechanism} those of attention and latent differ in width; give one of the two")
    return errors


def _check_experts(size: Size, backbone: Backbone) -> list[str]:
    groups, kept, experts = backbone.router_groups, backbone.router_groups_kept, size.num_experts
    if errors := check_divides("backbone.router_groups", groups, f"size.num_experts={experts}", experts):
        return errors
    if kept > groups:
        return [f"backbone.router_groups_kept={kept}: there are only {groups} groups (backbone.router_groups)"]
    if kept < groups == experts:
        return [
            f"backbone.router_groups={groups}: a group needs at least two of the {experts} experts, since it counts by "
            "its two best"
        ]
    if size.experts_per_token > (most := experts // groups * kept):
        return [
            f"size.experts_per_token={size.experts_per_token}: only {most} experts can be chosen (size.num_experts="
            f"{experts}, in {kept} of {groups} groups)"
        ]
    return []


def check_divides(name: str, value: int, what: str, number: int) -> list[str]:
    """Return the mistake of a setting that does not divide a number. what: a description of the number."""
    if number % value == 0:
        return []
    allowed = join_names(n for n in range(1, number + 1) if number % n == 0)
    return [f"{name}={value}: must divide {what}; allowed: {allowed}"]
