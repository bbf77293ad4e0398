"""ZeRO 3, where each rank holds a shard of every weight: what DeepSpeed must be told, leaves behind and gives back."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from depthlm.model import Decoder

PLAIN_LINEAR = torch.nn.functional.linear


def prepare_sharding(model: Decoder) -> None:
    """Say which module reads which weights, before DeepSpeed shards them.

    DeepSpeed gathers what a module owns when that module is called. Of a connection and an attention a layer calls
    methods, so what these own is read by the layer; what `open`, `close` and a tied head read, by the decoder. Untold,
    DeepSpeed notices such a read when the weight is not at hand. Small weights, which it keeps, are so first after a
    checkpoint, and then it stops: its order of gathers is fixed by the first steps.
    """
    import deepspeed

    model.read_alone()
    # every gather would warn that torch will rename what DeepSpeed calls
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # DeepSpeed lists the modules at work, and one whose recomputation stops early is never taken off
    model.register_forward_pre_hook(lambda *_: _modules_at_work().clear())
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
    """Take back what ZeRO 3 did to this process: DeepSpeed lists its modules, and F.linear is DeepSpeed's own."""
    _modules_at_work().clear()
    torch.nn.functional.linear = PLAIN_LINEAR


def copy_to_cpu(_: str, tensor: Tensor) -> Tensor:
    """A copy of a weight."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def whole_weights(engine: Any, keep: Callable[[str, Tensor], Tensor] = copy_to_cpu) -> dict[str, Tensor]:
    """The weights by name, each as `keep` keeps it; collective, and empty on other ranks than the first."""
    import deepspeed

    weights, first = {}, torch.distributed.get_rank() == 0
    for name, tensor in engine.module.state_dict(keep_vars=True).items():
        # one at a time, for they may not fit together; what is not sharded is left as it is
        with deepspeed.zero.GatheredParameters(tensor):
            if first:
                weights[name] = keep(name, tensor)
    return weights


def _modules_at_work() -> list[Any]:
    """DeepSpeed's list of the modules that are computing, the innermost last."""
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    return offload.FWD_MODULE_STACK if offload is not None else []
