"""A copy of the training state in CPU memory, for asynchronous checkpoints."""

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class Snapshot:
    """Copies of the state in reused buffers: allocating memory for every copy can be slower than the disk."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def copy(self, name: str, state: Any) -> Any:
        """Return the nested state with every tensor copied; valid until the next copy of that name."""
        if isinstance(state, Tensor):
            return self._copy(name, state.detach())
        if isinstance(state, dict):
            return type(state)({key: self.copy(f"{name}/{key}", value) for key, value in state.items()})
        if type(state) in (list, tuple):
            return type(state)(self.copy(f"{name}/{index}", value) for index, value in enumerate(state))
        # an object that training changes, such as the fp16 loss scaler
        return copy.deepcopy(state)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self.buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            # the earlier buffer is freed first
            self.buffers.pop(name, None)
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
            if tensor.is_cuda:
                pin(buffer)
            self.buffers[name] = buffer
        return buffer.copy_(tensor)


def pin(buffer: Tensor) -> None:
    """Make the memory of a tensor page-locked until the tensor is freed, so that a GPU copies to it directly.

    PyTorch's allocator of pinned memory would round its size up to a power of two. Raises: torch.cuda.CudaError, for
    example if the system does not allow to lock so much memory.
    """
    if buffer.nbytes:
        cuda, address = torch.cuda.cudart(), buffer.data_ptr()
        torch.cuda.check_error(int(cuda.cudaHostRegister(address, buffer.nbytes, 0)))
        weakref.finalize(buffer, cuda.cudaHostUnregister, address)


def tensors(state: Any) -> Iterator[Tensor]:
    """Yield every tensor in a nested state."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from tensors(value)


def nbytes(state: Any) -> int:
    """Return the bytes of memory behind all tensors in a nested state; shared storage is counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors(state)}
    return sum(storages.values())
