"""Checkpoints of experts that are spread over ranks.

DeepSpeed's file of rank 0 is for all ranks: it has the weights and, at ZeRO 0, the optimizer states, of experts only
those of rank 0. So every rank reads its weights from `model.safetensors`, which has all experts. At ZeRO 0, the states
of the other experts are in files of their own. At ZeRO 1 and 2, DeepSpeed saves the states of every rank anyway; the
experts of each rank have names of their own there, which `load_repartitioned` joins.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from depthlm.model.experts import Experts, spread_of
from depthlm.model.parameters import owned_parameters, part_of
from depthlm.runs.checkpoints import STATE, WEIGHTS
from depthlm.training.engine.spreading import spread_weights


def part_name(name: str, rank: int, ranks: int) -> str:
    """Return the name of the experts of a rank in the optimizer states of ZeRO 1 and 2."""
    return name if ranks == 1 else f"{name}.{rank}"


def name_parts(engine: Any, model: nn.Module) -> None:
    """Give spread weights the names of `part_name` in the optimizer states of ZeRO 1 and 2."""
    for name, weight in spread_weights(model).items():
        spread = spread_of(weight)
        assert spread is not None
        engine.param_names[weight] = part_name(name, spread.rank, spread.ranks)
    engine.optimizer._param_slice_mappings = engine.optimizer._create_param_mapping()


@contextmanager
def as_dense(engine: Any) -> Iterator[None]:
    """Let DeepSpeed save and load as without experts: it knows only the files of its own layers."""
    detected, engine.has_moe_layers = engine.has_moe_layers, False
    try:
        yield
    finally:
        engine.has_moe_layers = detected


def complete(states: dict[Path, Any], optimizer: Any, model: nn.Module, folder: Path, stage: int) -> dict[Path, Any]:
    """Return the contents of this rank's files of a checkpoint with what DeepSpeed lacks of spread experts.

    folder: of DeepSpeed's files.
    """
    weights, rank = spread_weights(model), torch.distributed.get_rank()
    for name, weight in weights.items():
        spread = spread_of(weight)
        assert spread is not None
        if stage == 0 and 0 < rank < spread.ranks:
            states.setdefault(_file(folder, rank), {})[name] = dict(optimizer.state[weight])
    return states


def gather(weight: Tensor) -> Tensor:
    """Return the whole of a weight on rank 0, and on other ranks anything; collective."""
    spread = spread_of(weight)
    if spread is None or torch.distributed.get_rank() >= spread.ranks:
        return weight
    parts = [torch.empty_like(weight) for _ in range(spread.ranks)] if spread.rank == 0 else None
    torch.distributed.gather(weight.detach(), parts, group=spread.group, group_dst=0)
    return weight if parts is None else torch.cat(parts)


def spread_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint at ZeRO 0 with the optimizer states of experts, by rank from rank 1."""
    return [_file(folder, number) for number in range(1, len(list(folder.glob("experts_*.pt"))) + 1)]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"experts_{rank}.pt"


@torch.no_grad()
def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Load the weights and buffers of a checkpoint, of spread experts those of this rank."""
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
                    own = parts[spread.rank]
                else:
                    own = part_of(weight, torch.cat([part.to(value.device) for part in parts]))
                state[key] = own.to(value.device, copy=True)


def expert_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the stacked weights of experts by name."""
    return {owned.name: owned.parameter for owned in owned_parameters(model) if isinstance(owned.owner, Experts)}
