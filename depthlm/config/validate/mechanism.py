"""The mechanism of a configuration: whether its classes are there, whether they take its settings, and their factories.

The settings of a mechanism are its own: its code says which there are and what they may be.
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

# what the decoder itself passes to each of its parts
PASSED = ("spec", "size", "backbone")


def factories(model: Model) -> "tuple[ConnectionFactory, AttentionFactory]":
    """What makes a connection and an attention at a place. Settings are data: no `_target_` inside them is built."""
    return (
        hydra.utils.instantiate(model.connection, _partial_=True, _recursive_=False),
        hydra.utils.instantiate(model.attention, _partial_=True, _recursive_=False),
    )


def check_target(name: str, settings: Any) -> list[str]:
    """Whether the settings of model.connection or model.attention name such a class and what it takes; the mistakes."""
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
    found = getattr(source, attribute, None)
    if found is None:
        classes = [other for other, value in vars(source).items() if inspect.isclass(value)]
        return [f"{name}._target_={target}: {module} has no {attribute}{nearest(attribute, classes)}"]
    interface = {"model.connection": Connection, "model.attention": SelfAttention}[name]
    if not (inspect.isclass(found) and issubclass(found, interface)):
        return [f"{name}._target_={target}: not a subclass of {interface.__module__}.{interface.__name__}"]
    parameters = inspect.signature(found).parameters
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
    """What the mechanism's code says of its settings: its parts are made, on meta, at the first and the last places."""
    import torch

    size, depth = config.size, config.model.loops * config.size.num_layers
    connection, attention = factories(config.model)
    # a setting may be wrong for a later layer alone, or for the final read, as one that counts layers
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
                    # a value that its code did not expect
                    given = {k: v for k, v in getattr(config.model, name.split(".")[1]).items() if k != "_target_"}
                    errors.append(f"{name}: {str(error).splitlines()[0]}; its settings are {given}")
    return list(dict.fromkeys(errors))
