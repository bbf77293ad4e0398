"""The engine of a pipeline: each rank has the weights of its chunks, and their optimizer.

The decoder of a rank is complete, but the parameters of other stages are on the device `meta` and not trained. Weights
are fp32, and 16 bits are autocast, as at ZeRO 0. A parameter of several stages, such as a tied embedding or the layers
of a loop, has a copy on each of them, whose gradients are added up.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B
from torch.utils._pytree import tree_leaves, tree_map

from depthlm.config import Config
from depthlm.data.sampler import inputs_and_targets
from depthlm.model import Decoder, Loss, initialize
from depthlm.model.parameters import OwnedParameter
from depthlm.optimizers.build import build_optimizer
from depthlm.runs.checkpoints import STATE
from depthlm.runs.manifest import CheckpointError
from depthlm.training.engine import Engine
from depthlm.training.engine.deepspeed import copy_to_cpu, settings_of
from depthlm.training.engine.reduction import StepGuard, buckets_of
from depthlm.training.pipeline.chunks import Layout, Route, find_layout, link, plan_route
from depthlm.training.pipeline.stage import Memory, Stage
from depthlm.training.plan import Plan

# the file of DeepSpeed at ZeRO 0
FILE = "mp_rank_00_model_states.pt"


class PipelineEngine(Engine):
    """The stages of this rank. `run_batch` takes the place of `__call__` and `backward`.

    A checkpoint has the weights and the states of the optimizer of all stages, as one process at ZeRO 0 has them.
    """

    def __init__(self, config: Config, plan: Plan, model: Decoder, layout: Layout, device: torch.device) -> None:
        """model: with the weights of this rank, by `draw_stage`."""
        optimizer: Any = build_optimizer(model, config.optimizer, plan.max_steps)
        guard = StepGuard(optimizer, config.training.gradient_clipping, self.norm)
        # what `Engine` uses of DeepSpeed
        substitute = SimpleNamespace(
            optimizer=optimizer,
            device=device,
            fp16_enabled=lambda: False,
            step=self.update,
            was_step_applied=lambda: not optimizer.overflow,
            get_global_grad_norm=lambda: optimizer._global_grad_norm,
            destroy=lambda: None,
        )
        super().__init__(substitute, model, optimizer, None, guard)
        self.layout, self.caching, self.global_steps = layout, config.training.pipeline.caching, 0
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.buckets = buckets_of(self.parameters.values(), config.deepspeed.bucket_elements(0))
        # by the shape of a batch, and whether it has gradients
        self.routes: dict[Any, Route] = {}
        self.stages: list[Stage] = []
        shared: Memory = {}
        factor = plan.loss_factor / plan.accumulation
        for chunk in layout.chunks[layout.stage :: layout.stages]:
            link(model, chunk)
            # without caching, a chunk receives again what an earlier one of the rank has
            memory = shared if self.caching else {}
            self.stages.append(Stage(config, model, chunk, len(layout.chunks), device, layout.group, memory, factor))
        stages: Any = self.stages
        self.schedule = (
            Schedule1F1B(stages[0], plan.accumulation, scale_grads=False)
            if len(stages) == 1
            else ScheduleInterleaved1F1B(stages, plan.accumulation, scale_grads=False)
        )
        # validation calls the decoder
        model.forward = self.evaluate  # type: ignore[method-assign, assignment]

    def run_batch(self, batch: Tensor, seeds: Tensor | None) -> Tensor:
        """Add the gradients of all micro-batches, averaged over the replicas. Returns this rank's [nll, loss], summed.

        batch: [accumulation, micro_batch, T + 1]. seeds: of dropout, [accumulation, micro_batch].
        """
        inputs, targets = inputs_and_targets(batch.flatten(0, 1))
        route = self.route(inputs[: batch.shape[1]])
        for stage in self.stages:
            stage.begin(route)
        given = (inputs, targets) if seeds is None else (inputs, targets, seeds.flatten())
        self.schedule.step(*given, return_outputs=False)
        self.average_gradients()
        return self.stages[-1].sums

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Loss:
        """Return the summed loss of a batch on the last stage, and zeros on the others; collective in a pipeline."""
        route = self.route(inputs)
        sending: list[Any] = []
        for stage in self.stages:
            stage.begin(route)
            for operation in stage.get_fwd_recv_ops(0):
                torch.distributed.recv(operation.tensor, operation.peer, operation.group)
            stage.forward_one_chunk(0, (inputs, targets))
            sending += [torch.distributed.isend(x.tensor, x.peer, x.group) for x in stage.get_fwd_send_ops(0)]
        for work in sending:
            work.wait()
        for stage in self.stages:
            stage.memory.clear()
            stage.outputs.clear()
        zero = torch.zeros((), device=self.device)
        return self.stages[-1].losses.pop(0, Loss(zero, zero, zero.long()))

    def route(self, inputs: Tensor) -> Route:
        """Return the route of a batch of this shape. The first call for it is collective in a pipeline.

        Each chunk then runs once on zeros, since what a mechanism sends may depend on autocast and kernels.
        """
        shape, layout = (inputs.shape, torch.is_grad_enabled()), self.layout
        if shape not in self.routes:
            cuts: list[Any] = []
            for chunk in layout.chunks[:-1]:
                own, stage = divmod(chunk.number, layout.stages)
                # a resumed run rehearses again, and must draw the same numbers
                with torch.random.fork_rng():
                    described = [self.stages[own].rehearse(inputs, cuts) if stage == layout.stage else None]
                sender = layout.replica * layout.stages + stage
                torch.distributed.broadcast_object_list(described, sender, layout.group)
                cuts += described[0] or []
            self.routes[shape] = plan_route(cuts, layout.stages, self.caching)
        return self.routes[shape]

    def average_gradients(self) -> None:
        """Average the gradients over the replicas, and add up those of parameters of several stages; collective.

        In this order, the copies of a parameter on several stages get the same bits.
        """
        for parameter in self.parameters.values():
            if parameter.grad is None:
                # as in DeepSpeed
                parameter.grad = torch.zeros_like(parameter)
        for bucket in self.buckets if self.layout.replicas is not None else []:
            flat = torch.cat([p.grad.reshape(-1) for p in bucket if p.grad is not None])
            torch.distributed.all_reduce(flat, group=self.layout.replicas)
            flat /= torch.distributed.get_world_size(self.layout.replicas)
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)
        for name, parameter in self.parameters.items():
            if (owners := self.layout.owners[name]) in self.layout.shared:
                torch.distributed.all_reduce(parameter.grad, group=self.layout.shared[owners])

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of which this stage is the first that has them."""
        return {name: p for name, p in self.parameters.items() if self.layout.owners[name][0] == self.layout.stage}

    def norm(self, _: list[nn.Parameter]) -> Tensor:
        """Return the norm of the gradients of all stages, in fp64; collective in a pipeline."""
        norm = nn.utils.get_total_norm([p.grad for p in self.own_parameters().values() if p.grad is not None])
        square = norm.to(self.device, torch.float64).square()
        torch.distributed.all_reduce(square, group=self.layout.group)
        return square.sqrt()

    def update(self) -> None:
        """Clip the gradient and update the weights, if it is finite on all ranks."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.global_steps += 1

    def state(self, checkpoint: Path) -> dict[Path, Any]:
        """Return the content of the file of a checkpoint on rank 0, as DeepSpeed writes it at ZeRO 0; collective."""
        states = {
            name: self.optimizer.state[p] for name, p in self.own_parameters().items() if p in self.optimizer.state
        }
        groups = [{key: x for key, x in g.items() if key != "params"} for g in self.optimizer.param_groups]
        parts = collect((states, groups, self.own_parameters()), self.layout, self.device)
        if not parts:
            return {}
        content = {
            "module": self.join([weights for _, _, weights in parts]),
            "optimizer": join_optimizers([part[:2] for part in parts], self.layout.groups),
            "lr_scheduler": None,
            "global_steps": self.global_steps,
            "global_samples": 0,
            "skipped_steps": 0,
            "dp_world_size": 1,
            "mp_world_size": 1,
        }
        return {checkpoint / STATE / FILE: content}

    def weights(self, keep: Callable[[str, Tensor], Tensor] = copy_to_cpu) -> dict[str, Tensor]:
        """Return the weights of all stages by name on rank 0, each copied by `keep`, and {} elsewhere; collective."""
        with self.evaluation_mode():
            parts = collect(self.own_parameters(), self.layout, self.device)
        return {name: keep(name, weight) for name, weight in self.join(parts).items()}

    def join(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the weights of all stages in the order of the decoder."""
        weights = {name: weight for part in parts for name, weight in part.items()}
        return {name: weights[name] for name in self.layout.owners if weights}

    def load_state(self, checkpoint: Path, saved_experts: int | None = None) -> None:
        """Load the weights and the optimizer of this stage from a checkpoint. Raises CheckpointError."""
        self.global_steps = load(checkpoint, self.model, self.optimizer)


def draw_stage(config: Config, model: Decoder, device: torch.device) -> Layout:
    """Give a model on meta the initial weights of the chunks of this rank, and return the layout; collective.

    All other weights stay on meta, and are not trained.
    """
    layout = find_layout(config, model)

    def place(owned: OwnedParameter, weight: Tensor) -> None:
        if layout.stage in layout.owners[owned.name]:
            parameter = nn.Parameter(weight.to(device), owned.parameter.requires_grad)
            owned.owner.register_parameter(owned.name_in_owner, parameter)
        else:
            owned.parameter.requires_grad_(False)

    initialize(model, config.seed, config.size.init_std, place, config.backbone)
    return layout


def collect(tree: Any, layout: Layout, device: torch.device) -> list[Any]:
    """Return nested containers of all stages on rank 0, with copies of all tensors on the CPU, and [] elsewhere.

    Collective. device: of this rank, from which tensors are sent one by one.
    """
    if layout.replica > 0:
        return []
    shapes = tree_map(lambda x: x.detach().to("meta") if isinstance(x, Tensor) else x, tree)
    trees: list[Any] | None = [None] * layout.stages if layout.stage == 0 else None
    torch.distributed.gather_object(shapes, trees, dst=0, group=layout.group)
    if trees is None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                torch.distributed.send(leaf.detach().to(device).contiguous(), 0, layout.group)
        return []

    def receive(leaf: Any, stage: int) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        # contiguous, also where the state of the sender is not
        buffer = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
        torch.distributed.recv(buffer, stage, layout.group)
        return buffer.cpu()

    own = tree_map(lambda x: copy_to_cpu("", x) if isinstance(x, Tensor) else x, tree)
    return [own, *(tree_map(partial(receive, stage=stage), trees[stage]) for stage in range(1, layout.stages))]


def join_optimizers(parts: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]], names: list[list[str]]) -> Any:
    """Return the `state_dict` of an optimizer of all parameters. parts: of each stage, its states and groups.

    names: of the parameters of each group.
    """
    states = {name: state for part, _ in parts for name, state in part.items()}
    groups, numbers = [], {name: number for number, name in enumerate(name for group in names for name in group)}
    for group in names:
        part = next(saved for _, each in parts for saved in each if saved["names"][0] in group)
        groups.append(part | {"names": group, "params": [numbers[name] for name in group]})
    return {"state": {numbers[name]: states[name] for name in numbers if name in states}, "param_groups": groups}


def load(checkpoint: Path, model: Decoder, optimizer: torch.optim.Optimizer) -> int:
    """Load the weights and the states of this stage from a checkpoint at ZeRO 0. Returns its number of updates.

    The groups keep the settings of the optimizer. Raises CheckpointError if the checkpoint lacks a parameter.
    """
    saved = torch.load(checkpoint / STATE / FILE, mmap=True, weights_only=False, map_location="cpu")
    # by the name of a parameter, its group and its number
    places = {
        name: (group, number)
        for group in saved["optimizer"]["param_groups"]
        for name, number in zip(group["names"], group["params"], strict=True)
    }
    groups: list[dict[str, Any]] = []
    for group, settings in zip(optimizer.param_groups, settings_of(optimizer), strict=True):
        if missing := [name for name in group["names"] if name not in places]:
            raise CheckpointError(f"{checkpoint}: there is no state of {missing[0]}")
        saved_groups, numbers = zip(*(places[name] for name in group["names"]), strict=True)
        groups.append(saved_groups[0] | settings | {"params": list(numbers)})
    own = {number for group in groups for number in group["params"]}
    states = {number: state for number, state in saved["optimizer"]["state"].items() if number in own}
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(saved["module"][name])
    return int(saved["global_steps"])
