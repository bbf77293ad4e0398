"""Expert parallelism: the experts of a layer are spread over ranks, in DeepSpeed's expert groups.

With s ranks per layer, ranks 0 to s - 1 have one copy of all experts, ranks s to 2s - 1 the next. DeepSpeed calls these
expert parallel groups. The ranks with the same experts reduce their gradients, and are an expert data parallel group.

In a checkpoint, DeepSpeed writes one file for all ranks, on rank 0: with the weights and, at ZeRO 0, the optimizer
states of rank 0, so only with the experts of that rank. Every rank therefore reads its weights from
`model.safetensors`, which has all experts. At ZeRO 0, the optimizer states of the other experts are in additional
files. At ZeRO 1 and 2, DeepSpeed saves the optimizer states of every rank; the experts of each rank have different
names there, which `load_repartitioned` joins.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from depthlm.config import Config
from depthlm.model import Decoder, initialize
from depthlm.model.experts import Experts, Spread, spread_of
from depthlm.model.parameters import OwnedParameter, owned_parameters, part_of
from depthlm.runs.checkpoints import STATE, WEIGHTS
from depthlm.training.engine.replace import replace_attributes
from depthlm.training.engine.sharding import configure_deepspeed


def draw_spread(config: Config, model: Decoder, device: torch.device) -> None:
    """Give a model on meta its initial weights, of which each rank keeps only its own experts; collective.

    Every rank draws full weights, one at a time, since a generator cannot skip to a part.
    """
    import deepspeed
    from deepspeed.utils import groups

    configure_deepspeed(config)
    deepspeed.init_distributed()
    groups._create_expert_and_data_parallel(config.deepspeed.experts)
    group = groups._get_expert_parallel_group(group_name(config.deepspeed.experts))
    spread = Spread(group, torch.distributed.get_rank(group), config.deepspeed.experts)

    def place(owned: OwnedParameter, weight: Tensor) -> None:
        if isinstance(owned.owner, Experts):
            owned.owner.keep(owned.name_in_owner, weight.to(device), spread)
        else:
            parameter = nn.Parameter(weight.to(device), owned.parameter.requires_grad)
            owned.owner.register_parameter(owned.name_in_owner, parameter)

    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty_like(buffer, device=device))
        if isinstance(module, Experts) and model.is_compiled:
            # how many tokens arrive is known only when they are sent
            module.exchange = torch.compiler.disable(module.exchange)
    initialize(model, config.seed, config.size.init_std, place, config.backbone)


def group_name(ranks: int) -> str:
    """Return DeepSpeed's name of the groups of experts that are spread over this many ranks."""
    return f"ep_size_{ranks}"


def reduction_group(weight: Tensor) -> Any:
    """Return the ranks that have the same weight, over which its gradient is reduced; None: all ranks."""
    spread = spread_of(weight)
    if spread is None:
        return None
    from deepspeed.utils import groups

    return groups._get_expert_data_parallel_group(group_name(spread.ranks))


def spread_weights(model: nn.Module) -> dict[str, tuple[Tensor, Spread]]:
    """Return the weights that are spread over ranks, by name, each with its `Spread`."""
    weights = ((name, weight, spread_of(weight)) for name, weight in model.named_parameters())
    return {name: (weight, spread) for name, weight, spread in weights if spread is not None}


def mark_experts(model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    """Mark spread weights and their optimizer groups as DeepSpeed's ZeRO 1 and 2 expect them."""
    for weight, spread in spread_weights(model).values():
        weight.allreduce = False  # type: ignore[attr-defined]
        weight.group_name = group_name(spread.ranks)  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        if (group_spread := spread_of(group["params"][0])) is not None:
            group |= {"moe": True, "name": group_name(group_spread.ranks)}


def detect_experts(model: Decoder) -> AbstractContextManager[None]:
    """Let DeepSpeed treat spread experts as its own, which it recognizes by their class, while it builds an engine."""
    from deepspeed.runtime import engine

    return replace_attributes(engine, MoE=Experts if spread_weights(model) else engine.MoE)


def total_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Return the norm of the gradients of a whole model; collective if experts are spread."""
    spread = [p for p in parameters if spread_of(p) is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if spread_of(p) is None and p.grad is not None])
    if not spread:
        return norm
    square = nn.utils.get_total_norm([p.grad for p in spread if p.grad is not None]).square()
    torch.distributed.all_reduce(square, group=spread_of(spread[0]).group)  # type: ignore[union-attr]
    return (norm.square() + square).sqrt()


def part_name(name: str, rank: int, ranks: int) -> str:
    """Return the name of the experts of a rank in the optimizer states of ZeRO 1 and 2."""
    return name if ranks == 1 else f"{name}.{rank}"


def name_parts(engine: Any, model: nn.Module) -> None:
    """Give spread weights the names of `part_name` in the optimizer states of ZeRO 1 and 2."""
    for name, (weight, spread) in spread_weights(model).items():
        engine.param_names[weight] = part_name(name, spread.rank, spread.ranks)
    engine.optimizer._param_slice_mappings = engine.optimizer._create_param_mapping()


def as_dense(engine: Any) -> AbstractContextManager[None]:
    """Let DeepSpeed save and load a model as if it had no experts: it knows only the files of its own layers."""
    return replace_attributes(engine, has_moe_layers=False)


def add_expert_states(
    states: dict[Path, Any], optimizer: Any, model: nn.Module, folder: Path, stage: int
) -> dict[Path, Any]:
    """Return the contents of this rank's files of a checkpoint with what DeepSpeed lacks of spread experts.

    folder: of DeepSpeed's files.
    """
    rank = torch.distributed.get_rank()
    for name, (weight, spread) in spread_weights(model).items():
        if stage == 0 and 0 < rank < spread.ranks:
            states.setdefault(_file(folder, rank), {})[name] = dict(optimizer.state[weight])
    return states


def gather_experts(weight: Tensor) -> Tensor:
    """Return the full weight on rank 0, and any part of it on the other ranks; collective."""
    spread = spread_of(weight)
    if spread is None or torch.distributed.get_rank() >= spread.ranks:
        return weight
    parts = [torch.empty_like(weight) for _ in range(spread.ranks)] if spread.rank == 0 else None
    torch.distributed.gather(weight.detach(), parts, group=spread.group, group_dst=0)
    return weight if parts is None else torch.cat(parts)


def spread_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint at ZeRO 0 with the optimizer states of experts, by rank from rank 1."""
    return [_file(folder, number) for number in range(1, len(list(folder.glob("experts_*.pt"))) + 1)]


@torch.no_grad()
def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Load the weights and buffers of a checkpoint; of spread experts, only those of this rank."""
    with safe_open(checkpoint / WEIGHTS, "pt") as saved:
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.copy_(part_of(tensor, saved.get_tensor(name)))


def load_states(checkpoint: Path, optimizer: Any, model: nn.Module) -> None:
    """Replace the optimizer states of experts at ZeRO 0, after DeepSpeed has loaded those of the file of rank 0."""
    others = [torch.load(file, mmap=True, weights_only=True) for file in spread_files(checkpoint / STATE)]
    for name, weight in expert_weights(model).items():
        spread, state = spread_of(weight), optimizer.state[weight]
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                parts = [value, *(other[name][key] for other in others)]
                if spread is not None and len(parts) == spread.ranks:
                    local = parts[spread.rank]
                else:
                    local = part_of(weight, torch.cat([part.to(value.device) for part in parts]))
                state[key] = local.to(value.device, copy=True)


def expert_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the stacked weights of experts by name."""
    return {owned.name: owned.parameter for owned in owned_parameters(model) if isinstance(owned.owner, Experts)}


def _file(folder: Path, rank: int) -> Path:
    return folder / f"experts_{rank}.pt"
