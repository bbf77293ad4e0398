"""ZeRO 3, where each rank holds a shard of every weight: construction, registration and cleanup."""

import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from depthlm.config import Config
from depthlm.machine import environment
from depthlm.model import Decoder, initialize
from depthlm.model.parameters import OwnedParameter, fp32_parameters
from depthlm.training.engine.settings import deepspeed_settings
from depthlm.training.plan import Plan

PLAIN_LINEAR = torch.nn.functional.linear


def configure_deepspeed(config: Config) -> None:
    """Set what DeepSpeed reads when it joins the process group."""
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    if environment.device_type(config.device) == "cpu":
        # DeepSpeed's shared-memory helper needs a compiler, and has aborted complete runs
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def draw_shards(config: Config, plan: Plan, model: Decoder) -> None:
    """Give a model on meta its initial weights, of which each rank keeps only its shards; collective.

    Every rank draws full weights, one at a time, since a generator cannot skip to a shard.
    """
    import deepspeed

    configure_deepspeed(config)
    # otherwise DeepSpeed checks its configuration for one rank
    deepspeed.init_distributed()
    # for an empty module, since a context would also replace the constructors of all modules and tensors
    sharding = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=deepspeed_settings(config, plan, model))
    in_fp32 = fp32_parameters(model)

    def place(owned: OwnedParameter, weight: Tensor) -> None:
        dtype = torch.float32 if owned.name in in_fp32 else sharding.dtype
        full = weight.to(sharding.local_device, dtype)
        parameter = nn.Parameter(full, owned.parameter.requires_grad)
        owned.owner.register_parameter(owned.name_in_owner, parameter)
        sharding._convert_to_zero_parameters([parameter])

    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty_like(buffer, device=sharding.local_device))
    initialize(model, config.seed, config.size.init_std, place)


def writable(weight: Tensor) -> AbstractContextManager:
    """Return a context in which a sharded weight is gathered, and after which the shards are those of rank 0's weight.

    Collective. Does nothing to other weights.
    """
    if not hasattr(weight, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(weight, modifier_rank=0)


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
    for module in (model.connections[0], model.connections[-1], *tied):
        for parameter in module.parameters():
            deepspeed.zero.register_external_parameter(model, parameter)


def undo_sharding() -> None:
    """Undo the global changes of ZeRO 3 in this process: DeepSpeed's list of modules, and its patched F.linear."""
    _active_modules().clear()
    torch.nn.functional.linear = PLAIN_LINEAR


def _active_modules() -> list[Any]:
    """Return DeepSpeed's list of the modules that are computing, the innermost last."""
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    return offload.FWD_MODULE_STACK if offload is not None else []
