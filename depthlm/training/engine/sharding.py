"""DeepSpeed's configuration, and ZeRO 3, where each rank holds a shard of every weight: construction and cleanup."""

import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from depthlm.config import Config
from depthlm.machine import environment
from depthlm.model import Decoder, initialize
from depthlm.model.parameters import OwnedParameter, fp32_parameters, shape_of
from depthlm.training.plan import Plan

PLAIN_LINEAR = torch.nn.functional.linear


def configure_deepspeed(config: Config) -> None:
    """Set what DeepSpeed reads when it joins the process group."""
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    # DeepSpeed calls deprecated functions of torch, so every gather of each rank would warn
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if environment.device_type(config.device) == "cpu":
        # DeepSpeed's shared-memory helper needs a compiler, and has aborted complete runs
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def deepspeed_settings(config: Config, plan: Plan, model: Decoder) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    sharding, precision = config.deepspeed, config.precision
    stage = sharding.stage
    parameters = sum(shape_of(parameter).numel() for parameter in model.parameters())
    settings: dict[str, Any] = {
        "train_batch_size": plan.batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": stage,
            # DeepSpeed allocates a buffer of this many gradients at the start
            "reduce_bucket_size": min(sharding.bucket_elements(stage), parameters),
            "allgather_bucket_size": sharding.allgather_bucket_size,
            "stage3_prefetch_bucket_size": sharding.prefetch_bucket_size,
            "overlap_comm": sharding.overlap_comm,
        },
        "zero_allow_untested_optimizer": True,
        # compiling DeepSpeed's own Adam for offloaded states takes minutes at the first start
        "zero_force_ds_cpu_optimizer": False,
        # at stage 0 StepGuard clips, since DeepSpeed would not report the norm
        "gradient_clipping": config.training.gradient_clipping if stage else 0.0,
        "data_types": {"grad_accum_dtype": "fp32"},
        # it would wait for the device before each forward pass
        "timers": {"throughput": {"enabled": False}},
    }
    if sharding.communication_data_type != "auto":
        settings["communication_data_type"] = sharding.communication_data_type
    if sharding.offload == "cpu":
        pinned = {"device": "cpu", "pin_memory": environment.device_type(config.device) == "cuda"}
        settings["zero_optimization"] |= {"offload_optimizer": pinned, "offload_param": pinned}
    if precision.name == "bf16" and stage == 0:
        # with bf16 weights at stage 0 DeepSpeed's first Adam step is wrong, so fp32 weights under autocast are used
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif precision.name == "bf16":
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
    elif precision.name == "fp16":
        settings["fp16"] = {
            "enabled": True,
            "initial_scale_power": precision.initial_scale_power,
            "loss_scale_window": precision.loss_scale_window,
            "hysteresis": precision.hysteresis,
            "min_loss_scale": precision.min_loss_scale,
        }
    return settings


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """Return the autocast context for computing outside the engine, as in validation."""
    return torch.autocast(device.type, dtype=half_dtype(config), enabled=config.precision.name != "fp32")


def half_dtype(config: Config) -> torch.dtype:
    """Return the dtype of a precision of 16 bits."""
    return torch.float16 if config.precision.name == "fp16" else torch.bfloat16


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
    initialize(model, config.seed, config.size.init_std, place, config.backbone)


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


def forget_group() -> None:
    """Let DeepSpeed, if it is imported, take the process group of the next run for a new one.

    It keeps its groups in variables, which nothing resets when the process group is destroyed.
    """
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    for name, value in list(vars(groups).items()):
        if name.endswith("_GROUP") or name.endswith("_GROUP_RANKS"):
            setattr(groups, name, {} if isinstance(value, dict) else None)
