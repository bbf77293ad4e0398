"""Where DeepSpeed's ZeRO 1 to 3 keep the elements of each parameter: flat partitions, one per group and rank.

And whether the state of an engine, partitioned or not, is finite.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class Fragment(NamedTuple):
    """Adjacent elements of a parameter on a rank. start: in the flattened parameter; offset: in the flat partition."""

    rank: int
    start: int
    offset: int
    length: int


class Partition(NamedTuple):
    """The part of a group of parameters that this rank updates.

    flat: the fp32 weights. group: the index of the optimizer's group. ranks: the process group that shares it.
    parameters: each with its fragments on all of these ranks, in the order of their starts.
    """

    flat: Tensor
    group: int
    ranks: Any
    parameters: list[tuple[nn.Parameter, list[Fragment]]]

    def local_fragments(self) -> Iterator[tuple[nn.Parameter, Fragment]]:
        """Yield the fragments of this rank."""
        rank = torch.distributed.get_rank(self.ranks)
        for parameter, fragments in self.parameters:
            yield from ((parameter, fragment) for fragment in fragments if fragment.rank == rank)


def partitions(optimizer: Any) -> list[Partition]:
    """Return the partitions of an optimizer of DeepSpeed's ZeRO, in the order in which it saves them."""
    indices: Iterable[int] = range(len(optimizer.optimizer.param_groups))
    if (flats := getattr(optimizer, "fp32_partitioned_groups_flat", None)) is not None:
        # ZeRO 3 divides each parameter by all ranks, and a large group into several
        parameters, divide = optimizer.fp16_groups, divide_each
        ranks = [optimizer._get_sub_group_process_group(number) for number in range(len(flats))]
        indices = [optimizer.sub_group_to_group_id[number] for number in range(len(flats))]
    elif (flats := getattr(optimizer, "single_partition_of_fp32_groups", None)) is not None:
        parameters, divide, ranks = optimizer.round_robin_bit16_groups, divide_together, optimizer.real_dp_process_group
    else:
        flats, parameters = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups
        divide, ranks = divide_together, optimizer.real_dp_process_group
    result = []
    for flat, index, members, group in zip(flats, indices, ranks, parameters, strict=True):
        # a weight that DeepSpeed has sharded has no elements itself
        sizes = [getattr(parameter, "ds_numel", parameter.numel()) for parameter in group]
        fragments = divide(sizes, flat.numel(), torch.distributed.get_world_size(members))
        result.append(Partition(flat, index, members, list(zip(group, fragments, strict=True))))
    return result


def divide_together(sizes: Iterable[int], partition: int, ranks: int) -> list[list[Fragment]]:
    """Divide adjacent parameters into equal partitions, as ZeRO 1 and 2 do."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return [
        [
            Fragment(rank, max(begin, rank * partition) - begin, max(begin - rank * partition, 0), length)
            for rank in range(begin // partition, ranks)
            if (length := min(end, (rank + 1) * partition) - max(begin, rank * partition)) > 0
        ]
        for begin, end in itertools.pairwise(ends)
    ]


def divide_each(sizes: Iterable[int], partition: int, ranks: int) -> list[list[Fragment]]:
    """Divide each parameter into equal shards, the last of which may be padded, as ZeRO 3 does."""
    offset, result = 0, []
    for size in sizes:
        shard = -(-size // ranks)
        lengths = [min(shard, size - rank * shard) for rank in range(ranks)]
        result.append([Fragment(rank, rank * shard, offset, n) for rank, n in enumerate(lengths) if n > 0])
        offset += shard
    return result


def nonfinite(model: nn.Module, optimizer: torch.optim.Optimizer, zero: Any | None) -> str | None:
    """Name a weight or a state of the optimizer on this rank that is not finite; None if there is none.

    zero: DeepSpeed's optimizer around it at ZeRO 1 to 3.
    """
    tensors = _replicated(model, optimizer) if zero is None else _sharded(model, optimizer, zero)
    return next((name for name, tensor in tensors if not _is_finite(tensor)), None)


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    # unlike torch.isfinite, it needs no memory
    return bool(torch.stack(tensor.detach().aminmax()).isfinite().all())


def _replicated(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter
        for key, state in optimizer.state.get(parameter, {}).items():
            yield from ((f"{key} of {name}", leaf) for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


def _sharded(model: nn.Module, optimizer: torch.optim.Optimizer, zero: Any) -> Iterator[tuple[str, Tensor]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for partition in partitions(zero):
        flat, states = partition.flat, optimizer.state.get(partition.flat, {})
        for parameter, fragment in partition.local_fragments():
            # what pads a partition may have any value
            elements, name = slice(fragment.offset, fragment.offset + fragment.length), names[parameter]
            yield name, parameter.ds_tensor[: fragment.length] if hasattr(parameter, "ds_tensor") else parameter
            yield name, flat[elements]
            for key, state in states.items():
                if isinstance(state, Tensor):
                    yield f"{key} of {name}", state[elements] if state.shape == flat.shape else state
