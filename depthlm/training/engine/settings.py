"""DeepSpeed's configuration, generated from ours. DeepSpeed reads no JSON written by the user."""

from typing import Any

import torch

from depthlm.config import Config, bucket_elements
from depthlm.machine import environment
from depthlm.model import Decoder
from depthlm.model.parameters import shape_of
from depthlm.training.plan import Plan


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
            "reduce_bucket_size": min(bucket_elements(sharding, stage), parameters),
            "allgather_bucket_size": sharding.allgather_bucket_size,
            "stage3_prefetch_bucket_size": sharding.prefetch_bucket_size,
            "overlap_comm": sharding.overlap_comm,
        },
        "zero_allow_untested_optimizer": True,
        # compiling DeepSpeed's own Adam for offloaded states takes minutes at the first start
        "zero_force_ds_cpu_optimizer": False,
        # at stage 0 guard_step clips, since DeepSpeed would not report the norm
        "gradient_clipping": config.training.gradient_clipping if stage else 0.0,
        "data_types": {"grad_accum_dtype": "fp32"},
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
