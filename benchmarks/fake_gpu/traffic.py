"""The bytes that an operator moves and saves on fake CUDA tensors, and its launches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from fake_gpu import machine_code
from fake_gpu.machine_code import Specialization
from fake_gpu.step import LaunchCounter

# kernels that get a table of sources, and write the gradients of the sources to the addresses in it
WRITE_GRADIENTS = ("_source_grads",)


@dataclass
class Traffic:
    """launches and moved: of the forward and the backward pass. saved: bytes kept for the backward pass, inputs aside.

    A launch moves each of its tensors once, and a tensor to which it adds twice.
    """

    launches: int = 0
    moved: int = 0
    saved: int = 0
    kernels: dict[Specialization, int] = field(default_factory=dict)


def measure(run: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> Traffic:
    """Trace a forward and a backward pass with gradients of all outputs. Call this in a FakeTensorMode."""
    counter, traffic, tables = LaunchCounter(), Traffic(), {}
    machine_code.record_launches(counter.launched)
    recorded = JITFunction.run

    def moved(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
        by_name = dict(zip(function.arg_names, args, strict=False)) | kwargs
        traffic.moved += launch_bytes(function.fn.__name__, by_name, tables)
        return recorded(function, *args, **kwargs)

    JITFunction.run = moved
    try:
        given = {counter.hold(x) for x in inputs}
        with counter, torch.autograd.graph.saved_tensors_hooks(counter.save, lambda x: x):
            outputs = run()
        traffic.saved = sum(counter.held[key] for key in counter.saved - given if key in counter.held)
        counter.phase = "backward"
        with counter:
            torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])
    finally:
        JITFunction.run = recorded
    traffic.moved += counter.moved
    traffic.launches = counter.launches.total()
    traffic.kernels = {version: grids.total() for version, grids in counter.triton.items()}
    return traffic


def launch_bytes(name: str, arguments: dict[str, Any], tables: dict[int, dict[str, Any]]) -> int:
    """Return the bytes that a launch moves. tables: by the storage of a table, the launch that wrote it."""
    if name == "_write_table":
        tables[_storage(arguments["table_ptr"])] = arguments
        return arguments["table_ptr"].nbytes
    tensors = {_storage(x): x for x in tree_leaves(arguments) if isinstance(x, Tensor)}
    of_table = next((tables[key] for key in tensors if key in tables), None)
    pointers = of_table or (arguments if "x_ptrs" in arguments else None)
    total = sum(x.nbytes for x in tensors.values())
    if pointers is not None:
        sources, grads = ({_storage(x): x for x in pointers[key]} for key in ("x_ptrs", "grad_ptrs"))
        writes = of_table is None or name in WRITE_GRADIENTS
        added = [x for j, x in enumerate(grads.values()) if pointers["added"] >> j & 1]
        if of_table is not None:
            total += sum(x.nbytes for x in sources.values())
            total += sum(x.nbytes for x in grads.values()) if writes else 0
        total += sum(x.nbytes for x in added) if writes else 0
    return total


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
