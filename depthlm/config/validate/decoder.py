"""Checks of the decoder: its shape is valid, and the classes of its mechanism and of the optimizer take their settings.

The class of a mechanism or an optimizer defines its settings and their allowed values.
"""

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hydra.utils import get_class

from depthlm.config.errors import join_names, nearest
from depthlm.config.schema import Config, Model
from depthlm.locations import install_command
from depthlm.model.shape import Backbone, Size, SublayerSpec

if TYPE_CHECKING:
    from depthlm.model.attention.self_attention import AttentionFactory
    from depthlm.model.connection import ConnectionFactory

# arguments of an optimizer that its parameter groups set, from the keys beside its settings
SET_BY_GROUPS = {"lr", "weight_decay"}
# the classes whose updates are like those of AdamW, for which the factors of a parametrization are known
LIKE_ADAMW = ("torch.optim.AdamW", "pytorch_optimizer.AdEMAMix", "pytorch_optimizer.ScheduleFreeAdamW")
# packages of classes in conf/, and the extras that install them
EXTRAS = {"pytorch_optimizer": "optimizers"}


def factories(model: Model) -> "tuple[ConnectionFactory, AttentionFactory]":
    """Return the factories of connections and attentions. A `_target_` nested in their settings is not instantiated."""
    connection, attention = (dict(settings) for settings in (model.connection, model.attention))
    return (
        partial(get_class(connection.pop("_target_")), **connection),
        partial(get_class(attention.pop("_target_")), **attention),
    )


def reads_across_layers(model: Model) -> bool:
    """Return whether the attention may read keys and values of other layers."""
    from depthlm.model.attention.self_attention import SelfAttention

    attention: Any = get_class(model.attention["_target_"])
    return attention.attend is not SelfAttention.attend


def check_target(name: str, settings: Any) -> list[str]:
    """Return the mistakes in one of FREE_GROUPS: a wrong class, or settings it does not accept."""
    import torch

    from depthlm.model.attention.self_attention import SelfAttention
    from depthlm.model.connection import Connection

    # the last value: how many leading parameters are not settings
    interface, example, first_setting = {
        "model.connection": (Connection, "depthlm.mechanisms.residual.Residual", 3),
        "model.attention": (SelfAttention, "depthlm.model.attention.self_attention.SelfAttention", 3),
        "optimizer.settings": (torch.optim.Optimizer, "torch.optim.AdamW", 1),
    }[name]
    where = f"{name.removesuffix('.settings')}._target_"
    target = settings.get("_target_")
    if not isinstance(target, str) or "." not in target:
        return [f"{where}={target}: not a class, as in {example}"]
    module, attribute = target.rsplit(".", 1)
    try:
        source = importlib.import_module(module)
    except ImportError as error:
        if extra := EXTRAS.get(str(error.name)):
            return [f"{where}={target}: {error.name} is not installed; {install_command(extra)}"]
        return [f"{where}={target}: cannot be imported ({error}); is its folder on PYTHONPATH?"]
    named_class = getattr(source, attribute, None)
    if named_class is None:
        classes = [other for other, value in vars(source).items() if inspect.isclass(value)]
        return [f"{where}={target}: {module} has no {attribute}{nearest(attribute, classes)}"]
    if not (inspect.isclass(named_class) and issubclass(named_class, interface)):
        return [f"{where}={target}: not a subclass of {interface.__module__}.{interface.__name__}"]
    parameters = _parameters(named_class)
    if parameters is None:
        return []
    not_settings = {*parameters[:first_setting], *inspect.signature(interface).parameters}
    not_settings |= SET_BY_GROUPS if name == "optimizer.settings" else set()
    allowed = [parameter for parameter in parameters if parameter not in not_settings]
    return [
        f"{name}.{setting}: {target} has no such setting; allowed: {join_names(allowed) or 'none'}"
        + nearest(setting, allowed)
        for setting in settings
        if setting != "_target_" and setting not in allowed
    ]


def _parameters(named_class: type) -> list[str] | None:
    """Return the parameters of a class; None: any. Those of `**kwargs` are what the classes above it name."""
    names: dict[str, None] = {}
    for ancestor in inspect.getmro(named_class)[:-1]:
        if (init := vars(ancestor).get("__init__")) is None:
            continue
        _, *parameters = inspect.signature(init).parameters.values()
        names |= dict.fromkeys(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return list(names)
    return None


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
    size, backbone, errors = config.size, config.backbone, []
    if size.num_heads % size.num_kv_heads:
        errors.append(
            f"size.num_kv_heads={size.num_kv_heads}: must divide size.num_heads={size.num_heads}; "
            f"allowed: {join_names(k for k in range(1, size.num_heads + 1) if size.num_heads % k == 0)}"
        )
    if backbone.position == "rope" and size.head_size % 2:
        errors.append(f"size.head_size={size.head_size}: RoPE rotates pairs; it must be even")
    if backbone.mlp == "experts":
        errors += _check_experts(size, backbone)
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
    groups, kept, errors = backbone.router_groups, backbone.router_groups_kept, []
    if size.num_experts % groups:
        errors.append(
            f"backbone.router_groups={groups}: must divide size.num_experts={size.num_experts}; "
            f"allowed: {join_names(n for n in range(1, size.num_experts + 1) if size.num_experts % n == 0)}"
        )
    elif kept > groups:
        errors.append(f"backbone.router_groups_kept={kept}: there are only {groups} groups (backbone.router_groups)")
    elif kept < groups == size.num_experts:
        errors.append(
            f"backbone.router_groups={groups}: a group needs at least two of the {size.num_experts} experts, since it "
            "counts by its two best"
        )
    elif size.experts_per_token > (most := size.num_experts // groups * kept):
        errors.append(
            f"size.experts_per_token={size.experts_per_token}: only {most} experts can be chosen (size.num_experts="
            f"{size.num_experts}, in {kept} of {groups} groups)"
        )
    return errors
