"""Weights and states of the optimizer of all stages: collected on rank 0, as one process at ZeRO 0 has them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from depthlm.model import Decoder
from depthlm.runs.checkpoints import STATE
from depthlm.runs.manifest import CheckpointError
from depthlm.training.engine.deepspeed import copy_to_cpu, settings_of
from depthlm.training.pipeline.layout import Layout

# the file of DeepSpeed at ZeRO 0
FILE = "mp_rank_00_model_states.pt"


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
    weights, saved_groups = saved["module"], saved["optimizer"]["param_groups"]
    numbers = {
        name: number for group in saved_groups for name, number in zip(group["names"], group["params"], strict=True)
    }
    groups: list[dict[str, Any]] = []
    states: dict[int, Any] = {}
    for group, settings in zip(optimizer.param_groups, settings_of(optimizer), strict=True):
        if missing := [name for name in group["names"] if name not in numbers]:
            raise CheckpointError(f"{checkpoint}: there is no state of {missing[0]}")
        saved_group = next(each for each in saved_groups if group["names"][0] in each["names"])
        ids = [numbers[name] for name in group["names"]]
        groups.append(saved_group | settings | {"params": ids})
        states |= {
            number: saved["optimizer"]["state"][number] for number in ids if number in saved["optimizer"]["state"]
        }
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(weights[name])
    return int(saved["global_steps"])
