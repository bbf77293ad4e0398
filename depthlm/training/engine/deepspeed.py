"""The DeepSpeed engine: generated configuration, start. No JSON of the user's reaches DeepSpeed."""

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
    """A DeepSpeed engine that holds the model and its optimizer, at step 0."""
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    if environment.device_type(config.device) == "cpu":
        # its shared-memory helper needs a compiler, and was seen to abort finished runs
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    optimizer = build_optimizer(model, config.optimizer)
    if config.deepspeed.stage == 0:
        guard_step(optimizer, config.training.gradient_clipping)
    undo_sharding()
    if config.deepspeed.stage == 3:
        prepare_sharding(model)
    settings = deepspeed_settings(config, plan, sum(parameter.numel() for parameter in model.parameters()))
    # its bf16 optimizer prints its memory whatever the level of the log
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    if engine.fp16_enabled():
        # at its smallest the scale would raise a bare exception, where training.on_bad_numbers is to decide
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False
    return engine


def deepspeed_settings(config: Config, plan: Plan, parameters: int) -> dict[str, Any]:
    """The JSON that DeepSpeed reads. parameters: how many the model has."""
    sharding, precision = config.deepspeed, config.precision
    stage = sharding.stage
    settings: dict[str, Any] = {
        "train_batch_size": plan.batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": stage,
            # room for so many gradients is taken at once
            "reduce_bucket_size": min(sharding.reduce_bucket_size, parameters),
            "allgather_bucket_size": sharding.allgather_bucket_size,
            "stage3_prefetch_bucket_size": sharding.prefetch_bucket_size,
            "overlap_comm": sharding.overlap_comm,
        },
        "zero_allow_untested_optimizer": True,
        # its own Adam for offloaded states is compiled for minutes at the first start
        "zero_force_ds_cpu_optimizer": False,
        # at stage 0 the optimizer's guard clips, since DeepSpeed would not tell the norm
        "gradient_clipping": config.training.gradient_clipping if stage else 0.0,
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    if sharding.communication_data_type != "auto":
        settings["communication_data_type"] = sharding.communication_data_type
    if sharding.offload == "cpu":
        pinned = {"device": "cpu", "pin_memory": environment.device_type(config.device) == "cuda"}
        settings["zero_optimization"] |= {"offload_optimizer": pinned, "offload_param": pinned}
    if precision.name == "bf16" and stage == 0:
        # bf16 weights at stage 0 start with a wrong Adam step: fp32 weights under autocast instead
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
    """The number format in which the model computes outside the engine, as in validation."""
    half = torch.float16 if config.precision.name == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=half, enabled=config.precision.name != "fp32")


def loss_scale(engine: Any) -> float:
    """The factor on the loss of the next step; 1 without fp16."""
    return float(engine.optimizer.cur_scale) if engine.fp16_enabled() else 1.0
