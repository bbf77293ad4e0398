"""Where ZeRO 1 to 3 of DeepSpeed keep the elements of each parameter: flat partitions, one per group and rank.

This module also checks the elements for non-finite values, and loads a checkpoint that another number of ranks wrote,
or whose experts were spread over another number of ranks. Each rank then reads its elements from the files of all
ranks. DeepSpeed's own converter knows only the two moments of Adam.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from depthlm.model.experts import spread_of
from depthlm.runs.manifest import CheckpointError
from depthlm.training.engine.experts import expert_weights, part_name

# the name of the fp32 weights among the states of a parameter
MASTER = "fp32"


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


class Piece(NamedTuple):
    """A part of a parameter in a file. states: flat tensors of one length, among them MASTER; values: all others."""

    states: dict[str, Tensor]
    values: dict[str, Any]
    offset: int
    length: int


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
    tensors = _iterate_replicated(model, optimizer) if zero is None else _iterate_sharded(model, optimizer, zero)
    return next((name for name, tensor in tensors if not _is_finite(tensor)), None)


def _is_finite(tensor: Tensor) -> bool:
    # a weight on meta is on another stage of a pipeline
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_meta:
        return True
    # unlike torch.isfinite, it needs no memory
    return bool(torch.stack(tensor.detach().aminmax()).isfinite().all())


def _iterate_replicated(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter
        for key, state in optimizer.state.get(parameter, {}).items():
            yield from ((f"{key} of {name}", leaf) for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


def _iterate_sharded(model: nn.Module, optimizer: torch.optim.Optimizer, zero: Any) -> Iterator[tuple[str, Tensor]]:
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


def load_repartitioned(folder: Path, zero: Any, model: nn.Module, saved_experts: int) -> None:
    """Load the states of DeepSpeed's ZeRO optimizer from the files in a folder.

    saved_experts: over how many ranks the checkpoint spreads the experts. Raises CheckpointError if a file or a
    parameter is missing.
    """
    prefix = "zero_pp_rank_"
    files = sorted(
        folder.glob(f"*{prefix}*_optim_states.pt"),
        key=lambda file: int(file.name.partition(prefix)[2].partition("_")[0]),
    )
    if not files:
        raise CheckpointError(f"{folder}: there are no states of an optimizer")
    contents = [torch.load(file, mmap=True, weights_only=False, map_location="cpu") for file in files]
    contents = [content["optimizer_state_dict"] for content in contents]
    pieces = pieces_of(contents, folder)
    names, experts = {parameter: name for name, parameter in model.named_parameters()}, expert_weights(model)
    optimizer = zero.optimizer
    for partition in partitions(zero):
        parts = {}
        for parameter, _ in partition.parameters:
            name = names[parameter]
            ranks = saved_experts if name in experts else 1
            saved = [part_name(name, rank, ranks) for rank in range(ranks)]
            if missing := set(saved) - pieces.keys():
                raise CheckpointError(f"{folder}: there are no states of {min(missing)}")
            parts[name] = [piece for part in saved for piece in pieces[part]]
        optimizer.state[partition.flat] = fill(partition, names, parts)
    optimizer_state = contents[0].get("base_optimizer_state") or contents[0]["optimizer_state_dict"]
    for group, saved_group in zip(optimizer.param_groups, optimizer_state["param_groups"], strict=True):
        group |= {key: value for key, value in saved_group.items() if key != "params"}
    if hasattr(zero, "_load_global_state_stage3"):
        zero._load_global_state_stage3(contents[0])
        for number in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
    else:
        # DeepSpeed gathers the weights itself after this
        zero._load_global_state(contents[0])


def pieces_of(contents: list[dict[str, Any]], folder: Path) -> dict[str, list[Piece]]:
    """Return the pieces of each parameter by its name, in the order of its elements. contents: by rank."""
    shapes = None
    if "fp32_flat_groups" in contents[0]:
        model_states = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
        shapes = torch.load(model_states, mmap=True, weights_only=False, map_location="cpu")["param_shapes"]
    pieces: dict[str, list[Piece]] = {}
    for rank, content in enumerate(contents):
        if shapes is None:
            flats, states = content["single_partition_of_fp32_groups"], content["base_optimizer_state"]["state"]
        else:
            flats, states = content["fp32_flat_groups"], content["optimizer_state_dict"]["state"]
        for number, flat in enumerate(flats):
            state = states.get(number, {})
            # at ZeRO 2, DeepSpeed saves what pads the last partition in the states, but not in the weights
            sharded = {
                key: value for key, value in state.items() if getattr(value, "ndim", 0) == 1 and len(value) >= len(flat)
            }
            values = {key: value for key, value in state.items() if key not in sharded}
            if shapes is None:
                slices = content["param_slice_mappings"][number].items()
                places = [(name, address.start, address.numel) for name, address in slices]
            else:
                fragments = divide_each([shape.numel() for shape in shapes[number].values()], 0, len(contents))
                places = [
                    (name, fragment.offset, fragment.length)
                    for name, all_fragments in zip(shapes[number], fragments, strict=True)
                    for fragment in all_fragments
                    if fragment.rank == rank
                ]
            for name, offset, length in places:
                pieces.setdefault(name, []).append(Piece({MASTER: flat, **sharded}, values, offset, length))
    return pieces


def fill(partition: Partition, names: dict[nn.Parameter, str], parts: dict[str, list[Piece]]) -> dict[str, Any]:
    """Set the weights of a partition, and return the states of the optimizer. parts: the pieces of each parameter."""
    flat, example = partition.flat.data, next(iter(parts.values()))[0]
    states = {key: torch.zeros_like(flat) for key in example.states.keys() - {MASTER}}
    for parameter, fragment in partition.local_fragments():
        spread = spread_of(parameter)
        begin = fragment.start + (0 if spread is None else spread.rank * parameter.numel())
        # where a piece starts in the parameter
        start = 0
        for piece in parts[names[parameter]]:
            first, last = max(begin, start), min(begin + fragment.length, start + piece.length)
            if first < last:
                target_elements = slice(fragment.offset + first - begin, fragment.offset + last - begin)
                saved_elements = slice(piece.offset + first - start, piece.offset + last - start)
                for key, target in ({MASTER: flat} | states).items():
                    target[target_elements] = piece.states[key][saved_elements]
            start += piece.length
    values = {key: value.clone() if isinstance(value, Tensor) else value for key, value in example.values.items()}
    return states | values
