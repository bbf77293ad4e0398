"""Whether the state of an engine is finite: its weights, and the states of its optimizer."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from depthlm.training.engine.zero.partitions import partitions


def nonfinite(model: nn.Module, optimizer: torch.optim.Optimizer, zero: Any | None) -> str | None:
    """Name a weight or a state of the optimizer on this rank that is not finite; None if there is none.

    zero: DeepSpeed's optimizer around it at ZeRO 1 to 3.
    """
    whole = _whole(model, optimizer) if zero is None else _sharded(model, optimizer, zero)
    return next((name for name, tensor in whole if not _is_finite(tensor)), None)


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    # unlike torch.isfinite, it needs no memory
    return bool(torch.stack(tensor.detach().aminmax()).isfinite().all())


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter
        for key, state in optimizer.state.get(parameter, {}).items():
            yield from ((f"{key} of {name}", leaf) for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


def _sharded(model: nn.Module, optimizer: torch.optim.Optimizer, zero: Any) -> Iterator[tuple[str, Tensor]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for partition in partitions(zero):
        flat, states = partition.flat, optimizer.state.get(partition.flat, {})
        for parameter, fragment in partition.own():
            # what pads a partition may have any value
            here, name = slice(fragment.offset, fragment.offset + fragment.length), names[parameter]
            yield name, parameter.ds_tensor[: fragment.length] if hasattr(parameter, "ds_tensor") else parameter
            yield name, flat[here]
            for key, state in states.items():
                if isinstance(state, Tensor):
                    yield f"{key} of {name}", state[here] if state.shape == flat.shape else state
