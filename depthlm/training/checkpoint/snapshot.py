"""A copy of the training state in the CPU's memory, to be written while training changes the state."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class Snapshot:
    """Copies that the next copies overwrite: memory that is taken anew each time can be slower than the disk."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def copy(self, name: str, state: Any) -> Any:
        """The same nested state with a copy of every tensor in it; valid until the next copy of that name."""
        if isinstance(state, Tensor):
            return self._copy(name, state.detach())
        if isinstance(state, dict):
            return type(state)({key: self.copy(f"{name}/{key}", value) for key, value in state.items()})
        if type(state) in (list, tuple):
            return type(state)(self.copy(f"{name}/{index}", value) for index, value in enumerate(state))
        # as fp16's loss scale, an object that training changes
        return copy.deepcopy(state)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        kept = self.kept.get(name)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self.kept[name] = kept
        return kept.copy_(tensor)


def tensors(state: Any) -> Iterator[Tensor]:
    """Every tensor in nested state."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from tensors(value)


def nbytes(state: Any) -> int:
    """Bytes of the memory behind all tensors in nested state; what several of them share is counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors(state)}
    return sum(storages.values())
