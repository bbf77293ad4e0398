"""DeepSpeed as an engine. All workarounds for it are in this package."""

import contextlib
import inspect
import io
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from depthlm.config import Config
from depthlm.model import Decoder, Loss, Observer
from depthlm.model.layer import UNOBSERVED
from depthlm.optimizers.build import build_optimizer
from depthlm.runs.checkpoints import STATE, WEIGHTS
from depthlm.runs.manifest import CheckpointError
from depthlm.training.engine import experts
from depthlm.training.engine.experts import detect_experts, mark_experts, spread_weights
from depthlm.training.engine.fp32 import keep_fp32, take_fp32
from depthlm.training.engine.optimizers import (
    averaged_weights,
    copy_to_model,
    count_updates,
    double_after_step,
    place_counters,
    split_matrices,
)
from depthlm.training.engine.partitions import load_repartitioned, nonfinite
from depthlm.training.engine.reduction import Reducer, StepGuard, agree_on_bf16_norm
from depthlm.training.engine.replace import replace_attributes
from depthlm.training.engine.sharding import (
    configure_deepspeed,
    deepspeed_settings,
    half_dtype,
    prepare_sharding,
    undo_sharding,
)
from depthlm.training.plan import Plan

# settings of the scaler of fp16, which a checkpoint contains beside its state
SCALER_KEYS = ("scale_window", "min_scale", "delayed_shift")
# what our parameter groups have besides the arguments of the class, and what DeepSpeed's groups of experts have
GROUP_KEYS = {"names", "kind", "lr", "lr_scale", "weight_decay", "moe", "name"}


def copy_to_cpu(_: str, tensor: Tensor) -> Tensor:
    """Return a copy of a weight on the CPU."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


class Engine:
    """A model with its optimizer in DeepSpeed, ready to train. model: the decoder, whose weights may be sharded.

    The training loop, checkpoints and benchmarks use nothing of an engine but these methods.

    run_batch: computes the gradients of a whole batch, where its micro-batches pass through a pipeline; else None.
    """

    run_batch: Callable[[Tensor, Tensor | None], Tensor] | None = None

    def __init__(
        self,
        deepspeed: Any,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        reducer: Reducer | None,
        guard: StepGuard | None,
    ) -> None:
        self.deepspeed, self.model, self.optimizer = deepspeed, model, optimizer
        # at ZeRO 0 only
        self.reducer, self.guard = reducer, guard

    @property
    def zero(self) -> Any | None:
        """DeepSpeed's optimizer around ours; None at ZeRO 0."""
        return self.deepspeed.optimizer if self.deepspeed.optimizer is not self.optimizer else None

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.deepspeed.device

    @property
    def fp16(self) -> bool:
        """Whether the engine scales the loss for fp16."""
        return self.deepspeed.fp16_enabled()

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step; 1 without fp16."""
        return float(self.deepspeed.optimizer.cur_scale) if self.fp16 else 1.0

    def __call__(
        self, inputs: Tensor, targets: Tensor, observer: Observer = UNOBSERVED, seeds_b: Tensor | None = None
    ) -> Loss:
        """Run the forward pass of a micro-batch [micro_batch, T]. seeds_b: for dropout, one per sequence."""
        return self.deepspeed(inputs, targets, observer=observer, seeds_b=seeds_b)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch. The engine divides by the accumulation steps and averages over ranks."""
        self.deepspeed.backward(loss)
        self.reduce()

    def skip_reduction(self) -> AbstractContextManager[None]:
        """Return a context in which `backward` leaves the gradients of this rank as they are; for ZeRO 0 only."""
        assert self.reducer is not None
        return self.reducer.pause()

    def reduce(self) -> None:
        """Average the gradients over ranks after the last micro-batch of a batch, as `backward` does outside of it."""
        if self.reducer is not None:
            self.reducer.finish()

    def step(self, nll: Tensor | None = None, skip: Tensor | None = None) -> float:
        """End a micro-batch. After the last of a batch, clip the gradient and update the weights if it is finite.

        nll: a number on the device, which is read together with the norm of the gradient, and returned.
        skip: whether to skip the update; at ZeRO 1 and above, a loss of NaN skips it instead.
        """
        if self.guard is None:
            self.deepspeed.step()
            return math.nan if nll is None else nll.item()
        self.guard.nll, self.guard.skip, self.guard.read_nll = nll, skip, math.nan
        self.deepspeed.step()
        return self.guard.read_nll

    def step_applied(self) -> bool:
        """Return whether the last update was applied; it is skipped if the gradient is not finite."""
        return self.deepspeed.was_step_applied()

    def grad_norm(self) -> float | None:
        """Return the global gradient norm of the last step, before clipping."""
        norm = self.deepspeed.get_global_grad_norm()
        return None if norm is None else float(norm)

    def nonfinite(self) -> str | None:
        """Name a weight or a state of the optimizer on this rank that is not finite; None if there is none."""
        return nonfinite(self.model, self.optimizer, self.zero)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of every parameter group to `lr` times the group's `lr_scale`."""
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]

    def state(self, checkpoint: Path) -> dict[Path, Any]:
        """Return the contents of this rank's files of a checkpoint by path, without writing them; collective.

        `torch.save` writes each of them. They alias the state, which the next step changes.
        """
        states: dict[Path, Any] = {}

        def collect(state_dict: dict[str, Any], path: str) -> None:
            states[Path(path)] = state_dict

        with (
            experts.as_dense(self.deepspeed),
            # nothing is written: the disk may be full, and DeepSpeed would copy its recovery script into the folder
            replace_attributes(self.deepspeed.checkpoint_engine, save=collect, makedirs=lambda *_, **__: None),
            replace_attributes(self.deepspeed, _copy_recovery_script=lambda _: None),
        ):
            self.deepspeed.save_checkpoint(str(checkpoint), tag=STATE, save_latest=False)
        stage = self.deepspeed.zero_optimization_stage()
        return experts.add_expert_states(states, self.deepspeed.optimizer, self.model, checkpoint / STATE, stage)

    def weights(self, keep: Callable[[str, Tensor], Tensor] = copy_to_cpu) -> dict[str, Tensor]:
        """Return the full weights by name, each copied by `keep`; collective, and empty on all ranks but rank 0.

        They are those of `evaluation_mode`.
        """
        import deepspeed

        weights, is_rank_0 = {}, torch.distributed.get_rank() == 0
        with self.evaluation_mode():
            for name, tensor in self.model.state_dict(keep_vars=True).items():
                # one weight at a time, since all together may not fit in memory; does nothing to unsharded weights
                with deepspeed.zero.GatheredParameters(tensor):
                    full = experts.gather_experts(tensor)
                    if is_rank_0:
                        # averages are in the model only now
                        weights[name] = keep(name, full.clone() if hasattr(self.optimizer, "eval") else full)
        return weights

    def evaluation_mode(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights that are evaluated and exported; collective.

        These are other weights than those in training only for an optimizer that averages the weights.
        """
        return averaged_weights(self.optimizer, self.zero)

    def load_state(self, checkpoint: Path, saved_experts: int | None = None) -> None:
        """Load weights, optimizer and engine state from a checkpoint; collective. Raises CheckpointError.

        The optimizer groups keep the settings of the engine. saved_experts: for a checkpoint that must be
        repartitioned, over how many ranks it spreads the experts; None: the ranks are those that wrote it.
        """
        optimizer, zero = self.optimizer, self.zero
        configured, clipping = settings_of(optimizer), getattr(zero, "clip_grad", None)
        scaler = getattr(zero, "loss_scaler", None)
        limits = {name: getattr(scaler, name) for name in SCALER_KEYS if hasattr(scaler, name)}
        spread = spread_weights(self.model) or experts.spread_files(checkpoint / STATE)
        load = (lambda **_: experts.load_weights(checkpoint, self.model)) if spread else None
        with contextlib.ExitStack() as stack:
            stack.enter_context(experts.as_dense(self.deepspeed))
            if saved_experts is not None:
                # DeepSpeed then loads only its own counters, and asks neither for a file of each rank nor for weights
                stack.enter_context(replace_attributes(self.deepspeed._config, load_universal_checkpoint=True))
                load_all = partial(load_repartitioned, checkpoint / STATE, self.zero, self.model, saved_experts)
                stack.enter_context(
                    replace_attributes(self.deepspeed.optimizer, load_state_dict=lambda **_: load_all())
                )
            loaded, _ = self.deepspeed.load_checkpoint(str(checkpoint), tag=STATE, custom_load_fn=load)
        if loaded is None:
            raise CheckpointError(f"{checkpoint}: DeepSpeed found no state in it")
        # of the parameters kept in fp32, DeepSpeed loads only the fp32 weights
        copy_to_model(self.zero)
        if spread and self.reducer is not None:
            experts.load_states(checkpoint, optimizer, self.model)
        # a fork may have other settings, and experts may have been spread
        if zero is not None and clipping is not None:
            zero.clip_grad = clipping
        for name, limit in limits.items():
            setattr(getattr(zero, "loss_scaler", None), name, limit)
        for group, settings in zip(optimizer.param_groups, configured, strict=True):
            for key in GROUP_KEYS & group.keys() - settings.keys():
                del group[key]
            group |= settings
        place_counters(optimizer, zero)
        if saved_experts is not None:
            # the files of the optimizer have no buffers
            with torch.no_grad(), safe_open(checkpoint / WEIGHTS, "pt") as weights:
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(weights.get_tensor(name))

    def destroy(self) -> None:
        """Release the model; the engine cannot be used afterwards."""
        if self.reducer is not None:
            self.reducer.remove()
        self.deepspeed.destroy()


def build_engine(config: Config, plan: Plan, model: Decoder) -> Engine:
    """Return a DeepSpeed engine that holds the model and its optimizer, at step 0.

    At ZeRO 3 the model may be sharded already, by `draw_shards`. Its experts may be spread, by `draw_spread`.
    """
    import deepspeed
    from deepspeed.runtime import torch_autocast

    configure_deepspeed(config)
    optimizer = build_optimizer(model, config.optimizer, plan.max_steps)
    mark_experts(model, optimizer)
    guard = None
    if config.deepspeed.stage == 0:
        guard = StepGuard(optimizer, config.training.gradient_clipping)
    if config.deepspeed.stage == 3:
        prepare_sharding(model)
    else:
        undo_sharding()
    # an earlier engine of this process, as in a sweep, may have set it, and DeepSpeed never unsets it
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    settings = deepspeed_settings(config, plan, model)
    is_half = config.deepspeed.stage > 0 and config.precision.name != "fp32"
    in_fp32 = take_fp32(model, half_dtype(config)) if is_half else {}
    # DeepSpeed's bf16 optimizer prints its memory use at every log level
    with contextlib.redirect_stdout(io.StringIO()), detect_experts(model):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    agree_on_bf16_norm(engine.device)
    if engine.fp16_enabled():
        # at the smallest scale DeepSpeed would raise an exception, but training.on_nonfinite decides what happens
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False
        double_after_step(engine.optimizer)
    if config.deepspeed.experts > 1 and config.deepspeed.stage > 0:
        experts.name_parts(engine, model)
    if in_fp32:
        keep_fp32(engine.optimizer, in_fp32)
        copy_to_model(engine.optimizer)
    if config.deepspeed.stage > 0:
        split_matrices(optimizer, engine.optimizer, engine.device)
    if config.deepspeed.stage == 3:
        count_updates(optimizer)
    return Engine(engine, model, optimizer, reducer_of(config, engine, model), guard)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the entries of each group that the configuration decides. All others are part of the optimizer's state."""
    arguments = inspect.signature(type(optimizer)).parameters
    return [
        {key: value for key, value in group.items() if key in GROUP_KEYS or (key in arguments and key != "params")}
        for group in optimizer.param_groups
    ]


def reducer_of(config: Config, engine: Any, model: Decoder) -> Reducer | None:
    """Return the reducer that averages the gradients over the ranks instead of DeepSpeed; None if DeepSpeed does."""
    if config.deepspeed.stage > 0:
        return None
    # it would also copy the gradients of a single rank to a flat tensor and back
    engine.enable_backward_allreduce = False
    size, dtype = config.deepspeed.bucket_elements(0), engine.communication_data_type
    return Reducer(model.parameters(), size, dtype, engine.is_gradient_accumulation_boundary)
