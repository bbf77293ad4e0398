"""The DeepSpeed engine and its generated configuration. DeepSpeed reads no JSON written by the user."""

import contextlib
import io
from typing import Any

import torch

from depthlm.config import Config
from depthlm.machine import environment
from depthlm.model import Decoder
from depthlm.training.engine.sharding import prepare_sharding, undo_sharding
from depthlm.training.optimizers import build_optimizer, guard_step
from depthlm.training.plan import Plan


def build_engine(config: Config, plan: Plan, model: Decoder) -> Any:
    """Return a DeepSpeed engine that holds the model and its optimizer, at step 0."""
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    if environment.device_type(config.device) == "cpu":
        # DeepSpeed's shared-memory helper needs a compiler, and has aborted complete runs
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    optimizer = build_optimizer(model, config.optimizer)
    if config.deepspeed.stage == 0:
        guard_step(optimizer, config.training.gradient_clipping)
    undo_sharding()
    if config.deepspeed.stage == 3:
        prepare_sharding(model)
    settings = deepspeed_settings(config, plan, sum(parameter.numel() for parameter in model.parameters()))
    # DeepSpeed's bf16 optimizer prints its memory use at every log level
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    if engine.fp16_enabled():
        # at the smallest scale DeepSpeed would raise an exception, but training.on_nonfinite decides what happens
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False
    return engine


def deepspeed_settings(config: Config, plan: Plan, parameters: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration. parameters: the number of the model's parameters."""
    sharding, precision = config.deepspeed, config.precision
    stage = sharding.stage
    settings: dict[str, Any] = {
        "train_batch_size": plan.batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": stage,
            # DeepSpeed allocates a buffer of this many gradients at the start
            "reduce_bucket_size": min(sharding.reduce_bucket_size, parameters),
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
    half = torch.float16 if config.precision.name == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=half, enabled=config.precision.name != "fp32")


def loss_scale(engine: Any) -> float:
    """Return the loss scale of the next step; 1 without fp16."""
    return float(engine.optimizer.cur_scale) if engine.fp16_enabled() else 1.0
