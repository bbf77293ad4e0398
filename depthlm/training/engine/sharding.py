"""ZeRO 3, where each rank holds a shard of every weight: registration and cleanup."""

import sys
import warnings
from typing import Any

import torch

from depthlm.model import Decoder

PLAIN_LINEAR = torch.nn.functional.linear


def prepare_sharding(model: Decoder) -> None:
    """Register which module reads which weights, before DeepSpeed shards them.

    DeepSpeed gathers a module's own weights when that module is called. But a layer calls methods of its connections
    and its attention, so the layer reads their weights. The decoder reads the weights of `open`, `close` and a tied
    head. Without registration, DeepSpeed notices such a read only when the weight is not available. Small weights,
    which stay gathered, first become unavailable after a checkpoint; DeepSpeed then fails, since the first steps have
    fixed its order of gathers.
    """
    import deepspeed

    model.read_alone()
    # DeepSpeed calls a deprecated torch function, so every gather would warn
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # DeepSpeed never removes a module whose recomputation stops early from its list of active modules
    model.register_forward_pre_hook(lambda *_: _active_modules().clear())
    for position in range(model.loops * model.size.num_layers):
        layer = model.layers[position % model.size.num_layers]
        for part in (layer.attention, *model.connections[2 * position : 2 * position + 2]):
            for parameter in part.parameters():
                deepspeed.zero.register_external_parameter(layer, parameter)
    tied = [model.embedding] if model.backbone.tie_embeddings else []
    for part in (model.connections[0], model.connections[-1], *tied):
        for parameter in part.parameters():
            deepspeed.zero.register_external_parameter(model, parameter)


def undo_sharding() -> None:
    """Undo the global changes of ZeRO 3 in this process: DeepSpeed's list of modules, and its patched F.linear."""
    _active_modules().clear()
    torch.nn.functional.linear = PLAIN_LINEAR


def _active_modules() -> list[Any]:
    """Return DeepSpeed's list of the modules that are computing, the innermost last."""
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    return offload.FWD_MODULE_STACK if offload is not None else []
