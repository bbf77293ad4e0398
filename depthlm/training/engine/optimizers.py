"""What optimizers need around DeepSpeed: averages of weights, counters of updates, and whole matrices for Muon."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthlm.model.experts import spread_of
from depthlm.model.parameters import shape_of
from depthlm.optimizers.muon import MATRICES, MuonAndAdamW, Orthogonalized, orthogonalize
from depthlm.training.engine.partitions import Fragment, Partition, partitions


@contextmanager
def averaged_weights(optimizer: Any, zero: Any | None) -> Iterator[None]:
    """Give the model the averages of an optimizer while the block runs, and then its weights, bit for bit; collective.

    Does nothing for an optimizer without averages. zero: DeepSpeed's optimizer around it at ZeRO 1 to 3.
    """
    if not hasattr(optimizer, "eval"):
        yield
        return
    with all_parameters(zero):
        flats: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # `train` computes the weights from the averages, with other rounding
        weights = [flat.detach().clone() for flat in flats]
        optimizer.eval()
    copy_to_model(zero)
    try:
        yield
    finally:
        with all_parameters(zero), torch.no_grad():
            optimizer.train()
            for flat, saved in zip(flats, weights, strict=True):
                flat.copy_(saved)
        copy_to_model(zero)


@contextmanager
def all_parameters(zero: Any | None) -> Iterator[None]:
    """Give the groups of an optimizer their parameters, which DeepSpeed's ZeRO 3 removes between updates."""
    is_sharded = hasattr(zero, "fp32_partitioned_groups_flat")
    if is_sharded:
        zero._set_fp32_optimizer_param_groups()  # type: ignore[union-attr]
    try:
        yield
    finally:
        if is_sharded:
            zero._clear_fp32_optimizer_param_groups()  # type: ignore[union-attr]


def copy_to_model(zero: Any | None) -> None:
    """Copy the fp32 weights of ZeRO 1 to 3 to the model; collective."""
    if zero is None:
        return
    if not hasattr(zero, "fp32_partitioned_groups_flat"):
        zero.update_lp_params()
        return
    zero.checkpoint_event_prologue()
    for number in range(len(zero.fp32_partitioned_groups_flat)):
        zero._reassign_or_swap_out_partitioned_parameters(number)
    zero.checkpoint_event_epilogue()


def place_counters(optimizer: torch.optim.Optimizer, zero: Any | None) -> None:
    """Put counters of updates where torch's optimizers want them: beside the weights if fused, else on the CPU.

    A checkpoint may have been written on another device, or with another setting.
    """
    with all_parameters(zero):
        for group in optimizer.param_groups:
            beside = group.get("fused") or group.get("capturable")
            for parameter in group["params"] if {"fused", "capturable"} & group.keys() else []:
                state = optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].to(parameter.device if beside else "cpu")


def double_after_step(zero: Any) -> None:
    """Let the fp16 loss scale double after an update: DeepSpeed doubles it before it divides the gradient by it."""
    update = zero.step

    def step(*arguments: Any, **settings: Any) -> None:
        update(*arguments, **settings)
        if not zero.overflow:
            zero.loss_scaler.update_scale(False)

    def lower_scale(has_overflow: bool = False) -> None:
        if has_overflow:
            zero.loss_scaler.update_scale(True)

    zero.step, zero._update_scale = step, lower_scale


def count_updates(optimizer: torch.optim.Optimizer) -> None:
    """Make `optimizer.step` ignore groups without parameters, and count the parts of a group as one update."""
    update = optimizer.step
    # by group, its entries before the update in progress, and the parts that have been updated since
    before: dict[int, dict[str, Any]] = {}
    updated: dict[int, list[Tensor]] = {}

    def step(*_: Any) -> None:
        groups = optimizer.param_groups
        for number, group in enumerate(groups):
            if not group["params"]:
                continue
            (part,) = group["params"]
            if number not in updated or any(part is other for other in updated[number]):
                before[number], updated[number] = {k: v for k, v in group.items() if k != "params"}, []
            elif updated[number]:
                for key in group.keys() - before[number].keys() - {"params"}:
                    del group[key]
                group |= before[number]
            updated[number].append(part)
            optimizer.param_groups = [group]
            update()
        optimizer.param_groups = groups

    optimizer.step = step  # type: ignore[method-assign, assignment]


def split_matrices(optimizer: torch.optim.Optimizer, zero: Any, device: torch.device) -> None:
    """Let Muon, if this is the optimizer, update the flat partitions of ZeRO. zero: DeepSpeed's optimizer around it."""
    if isinstance(optimizer, MuonAndAdamW):
        optimizer.split = {
            partition.flat: Exchange(partition, device)
            for partition in partitions(zero)
            if optimizer.param_groups[partition.group]["kind"] in MATRICES
        }


class Matrix(NamedTuple):
    """A matrix [m, n] of a partition, and where its elements are."""

    shape: tuple[int, int]
    fragments: list[Fragment]


class Exchange:
    """Sends the elements of each matrix to one rank, orthogonalizes it there, and sends the results back.

    Elements are sent in bf16, the dtype in which matrices are orthogonalized. A matrix that is on one rank stays there.
    The others are assigned so that the ranks compute for about the same time. All ranks compute the same assignment.
    """

    def __init__(self, partition: Partition, device: torch.device) -> None:
        self.ranks, self.device = partition.ranks, device
        rank, size = torch.distributed.get_rank(partition.ranks), torch.distributed.get_world_size(partition.ranks)
        assigned = assign(list(matrices_of(partition)), size)
        self.matrices = assigned[rank]
        # by rank: the fragments that are sent there, each with the shape of its matrix, and those that are received
        self.outgoing = [
            [(m.shape, f) for m in matrices for f in m.fragments if f.rank == rank] for matrices in assigned
        ]
        self.incoming = [[f for m in self.matrices for f in m.fragments if f.rank == other] for other in range(size)]

    def orthogonalize(self, update: Tensor, steps: int) -> Iterator[Orthogonalized]:
        """Yield the orthogonalized elements of this rank for its flat update; collective."""
        outgoing, incoming = list(itertools.chain(*self.outgoing)), list(itertools.chain(*self.incoming))
        sizes = [sum(f.length for _, f in fragments) for fragments in self.outgoing]
        other_sizes = [sum(f.length for f in fragments) for fragments in self.incoming]
        flat = update.to(self.device)
        # torch.cat refuses an empty list, and there may be nothing to send
        sent = torch.cat([flat[:0], *(flat[f.offset : f.offset + f.length] for _, f in outgoing)])
        arrived = self._send(sent, sizes, other_sizes)
        parts = dict(zip(incoming, arrived.split([f.length for f in incoming]), strict=True))
        for shape, group in itertools.groupby(self.matrices, lambda matrix: matrix.shape):
            matrices = list(group)
            stack = torch.stack([torch.cat([parts[f] for f in m.fragments]).view(shape) for m in matrices])
            for matrix, result in zip(matrices, orthogonalize(stack, steps), strict=True):
                elements = result.reshape(-1)
                parts |= {f: elements[f.start : f.start + f.length] for f in matrix.fragments}
        results = torch.cat([flat[:0], *(parts[f] for f in incoming)])
        returned = self._send(results, other_sizes, sizes).to(update.device)
        for (shape, f), values in zip(outgoing, returned.split([f.length for _, f in outgoing]), strict=True):
            yield Orthogonalized(f.offset, values, shape)

    def _send(self, elements: Tensor, sent: list[int], received: list[int]) -> Tensor:
        if len(sent) == 1:
            return elements
        result = elements.new_empty(sum(received))
        torch.distributed.all_to_all_single(result, elements, received, sent, group=self.ranks)
        return result


def matrices_of(partition: Partition) -> Iterator[Matrix]:
    """Yield the matrices of a partition; a stack of experts has several. Fragments start from the matrix."""
    for parameter, fragments in partition.parameters:
        *_, m, n = shape = tuple(parameter.shape if spread_of(parameter) else shape_of(parameter))
        for begin in range(0, math.prod(shape), m * n):
            parts = [
                Fragment(f.rank, first - begin, f.offset + first - f.start, last - first)
                for f in fragments
                if (first := max(f.start, begin)) < (last := min(f.start + f.length, begin + m * n))
            ]
            yield Matrix((m, n), parts)


def assign(matrices: list[Matrix], ranks: int) -> list[list[Matrix]]:
    """Return the matrices that each rank orthogonalizes."""
    assigned: list[list[Matrix]] = [[] for _ in range(ranks)]
    costs = [0] * ranks
    for matrix in sorted(matrices, key=lambda matrix: len(matrix.fragments) > 1):
        rank = min((f.rank for f in matrix.fragments), key=lambda rank: (costs[rank], rank))
        assigned[rank].append(matrix)
        costs[rank] += math.prod(matrix.shape) * min(matrix.shape)
    return assigned
