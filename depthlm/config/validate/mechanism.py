"""Checks of the mechanism of a configuration (its classes exist and accept its settings), and its factories.

The class of a mechanism defines its settings and their allowed values.
"""

import importlib
import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import hydra

from depthlm.config.schema import Config, Model
from depthlm.config.validate.errors import listed, nearest
from depthlm.model.sublayer_spec import SublayerSpec

if TYPE_CHECKING:
    from depthlm.model.attention.self_attention import AttentionFactory
    from depthlm.model.connections.connection import ConnectionFactory

# arguments that the decoder passes to each part
PASSED = ("spec", "size", "backbone")


def factories(model: Model) -> "tuple[ConnectionFactory, AttentionFactory]":
    """Return the factories of connections and attentions. A `_target_` nested in their settings is not instantiated."""
    return (
        hydra.utils.instantiate(model.connection, _partial_=True, _recursive_=False),
        hydra.utils.instantiate(model.attention, _partial_=True, _recursive_=False),
    )


def check_target(name: str, settings: Any) -> list[str]:
    """Return the mistakes in model.connection or model.attention: a wrong class, or settings it does not accept."""
    from depthlm.model.attention.self_attention import SelfAttention
    from depthlm.model.connections.connection import Connection

    target = settings.get("_target_")
    if not isinstance(target, str) or "." not in target:
        return [f"{name}._target_={target}: not a class, as in depthlm.model.connections.residual.Residual"]
    module, attribute = target.rsplit(".", 1)
    try:
        source = importlib.import_module(module)
    except ImportError as error:
        return [f"{name}._target_={target}: cannot be imported ({error}); is its folder on PYTHONPATH?"]
    mechanism_class = getattr(source, attribute, None)
    if mechanism_class is None:
        classes = [other for other, value in vars(source).items() if inspect.isclass(value)]
        return [f"{name}._target_={target}: {module} has no {attribute}{nearest(attribute, classes)}"]
    interface = {"model.connection": Connection, "model.attention": SelfAttention}[name]
    if not (inspect.isclass(mechanism_class) and issubclass(mechanism_class, interface)):
        return [f"{name}._target_={target}: not a subclass of {interface.__module__}.{interface.__name__}"]
    parameters = inspect.signature(mechanism_class).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return []
    allowed = [p for p in parameters if p not in PASSED]
    return [
        f"{name}.{setting}: {target} has no such setting; allowed: {listed(allowed) or 'none'}"
        + nearest(setting, allowed)
        for setting in settings
        if not setting.startswith("_") and setting not in allowed
    ]


def check_values(config: Config) -> list[str]:
    """Return the mistakes that the mechanism reports when its first and last parts are built on the meta device."""
    import torch

    size, depth = config.size, config.model.loops * config.size.num_layers
    connection, attention = factories(config.model)
    # a setting, such as a number of layers, may be invalid only for a later layer or for the final read
    connected = [SublayerSpec(layer, kind, depth) for layer in (0, depth - 1) for kind in ("attention", "mlp")]
    connected.append(SublayerSpec(depth, "final", depth))
    attending = [SublayerSpec(i, "attention", size.num_layers, config.model.loops) for i in (0, size.num_layers - 1)]
    parts: list[tuple[str, Callable[..., object], list[SublayerSpec]]] = [
        ("model.connection", connection, connected),
        ("model.attention", attention, attending),
    ]
    errors = []
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
