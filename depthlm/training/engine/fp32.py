"""Parameters of a bf16 or fp16 model that stay in fp32 at ZeRO 1 to 3: those of `fp32_parameters`.

DeepSpeed casts every parameter, and after an update copies its fp32 weights to the model in 16 bits. Here, the model
reads the fp32 weights of these parameters. Their gradients are fp32 until DeepSpeed copies them to its buffers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from depthlm.model.parameters import fp32_parameters
from depthlm.training.engine.partitions import Fragment, Partition, partitions
from depthlm.training.engine.sharding import writable

# full and flat, by parameter
Values = dict[nn.Parameter, Tensor]


def take_fp32(model: nn.Module, dtype: torch.dtype) -> Values:
    """Return the fp32 values of these parameters before DeepSpeed casts the model to a dtype; collective."""
    values = {}
    for parameter in fp32_parameters(model).values():
        with writable(parameter):
            values[parameter] = parameter.detach().flatten().clone()
        if hasattr(parameter, "ds_tensor"):
            # DeepSpeed moves all shards to one tensor
            parameter.ds_tensor.data = parameter.ds_tensor.to(dtype)
    return values


@torch.no_grad()
def keep_fp32(zero: Any, values: Values) -> None:
    """Let these parameters have the fp32 weights of DeepSpeed's ZeRO optimizer, which get their values; collective.

    They follow whenever DeepSpeed copies its fp32 weights to the model, so `copy_to_model` shows them too.
    """
    is_sharded = hasattr(zero, "fp32_partitioned_groups_flat")
    updates: dict[int, Callable[[], None]] = {}
    for number, partition in enumerate(partitions(zero)):
        kept = {parameter for parameter, _ in partition.parameters if parameter in values}
        for parameter, fragment in partition.local_fragments():
            if parameter in kept:
                _part(partition, fragment).copy_(_piece(values[parameter], fragment))
        if kept:
            updates[number] = _shards(partition, kept) if is_sharded else _copies(partition, kept)

    def update(*numbers: int) -> None:
        for number in numbers or updates:
            if number in updates:
                updates[number]()

    # what points the parameters of a group to its 16-bit weights, and what copies those of all groups
    for name in ("_unflatten_partitioned_parameters", "_update_model_bit16_weights", "update_lp_params"):
        if hasattr(zero, name):
            setattr(zero, name, _then(getattr(zero, name), update))


def _then(first: Callable[..., None], second: Callable[..., None]) -> Callable[..., None]:
    def both(*arguments: Any) -> None:
        first(*arguments)
        second(*arguments)

    return both


def _shards(partition: Partition, kept: set[nn.Parameter]) -> Callable[[], None]:
    """Return a function that makes the shards of ZeRO 3 parts of the fp32 weights, so that DeepSpeed gathers these."""
    members: list[Any] = [parameter for parameter, _ in partition.parameters]
    parts = partition.flat.detach().split([parameter.ds_tensor.numel() for parameter in members])
    shards = [(p.ds_tensor, part) for p, part in zip(members, parts, strict=True) if p in kept]

    def update() -> None:
        for shard, part in shards:
            shard.data = part

    return update


def _copies(partition: Partition, kept: set[nn.Parameter]) -> Callable[[], None]:
    """Return a collective function that gives every rank the fp32 weights of ZeRO 1 and 2."""
    members = [parameter for parameter, _ in partition.parameters if parameter in kept]
    sizes = [parameter.numel() for parameter in members]
    flat = torch.empty(sum(sizes), dtype=torch.float32, device=members[0].device)
    copies = dict(zip(members, flat.split(sizes), strict=True))
    local_parts = [
        (_piece(copies[parameter], fragment), _part(partition, fragment))
        for parameter, fragment in partition.local_fragments()
        if parameter in kept
    ]

    @torch.no_grad()
    def update() -> None:
        flat.zero_()
        for copy, part in local_parts:
            copy.copy_(part)
        # each element is on one rank
        torch.distributed.all_reduce(flat, group=partition.ranks)
        for parameter, copy in copies.items():
            parameter.data = copy.view(parameter.shape)

    return update


def _piece(values: Tensor, fragment: Fragment) -> Tensor:
    return values[fragment.start : fragment.start + fragment.length]


def _part(partition: Partition, fragment: Fragment) -> Tensor:
    return partition.flat.detach()[fragment.offset : fragment.offset + fragment.length]
