"""Triton launches: recorded instead of executed, and compiled to machine code for sm_90, which is then inspected."""

import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction, MockTensor

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# of a multiprocessor of an H100: registers, warps, blocks, bytes of shared memory; of these, reserved per block
REGISTERS, WARPS, BLOCKS, SHARED, RESERVED = 65536, 64, 32, 233472, 1024

Grid = tuple[int, ...]


class Specialization:
    """One version of a kernel, which Triton compiles at its first launch."""

    def __init__(self, function: JITFunction, compile_arguments: tuple[Any, ...]):
        self.function, self.compile_arguments, self.arguments = function, compile_arguments, ""
        self.kernel = f"{function.fn.__module__.removeprefix('depthlm.ops.')}.{function.fn.__name__}"

    def inspect(self) -> dict[str, Any]:
        """Compile this version; return its use of registers, stack and memory, and its instructions."""
        started = time.perf_counter()
        compiled = _compile(self.function, *self.compile_arguments)
        seconds = time.perf_counter() - started
        # otherwise a later launch would find the compiled kernel and not be recorded
        self.function.device_caches.clear()
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(compiled.asm["cubin"])
            usage, code = (
                subprocess.check_output([CUOBJDUMP, option, file.name], text=True, stderr=subprocess.DEVNULL)
                for option in ("-res-usage", "-sass")
            )
        registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
        instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code, re.M)
        counts = Counter(name.partition(".")[0] for name in instructions)
        warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
        registers_of_block = -(-registers * 32 // 256) * 256 * warps
        return {
            "warps": warps,
            "registers": registers,
            "stack": stack,
            "spill_stores": counts["STL"],
            "spill_loads": counts["LDL"],
            "shared_memory": shared,
            "blocks_per_sm": min(
                REGISTERS // registers_of_block, WARPS // warps, BLOCKS, SHARED // (shared + RESERVED)
            ),
            "load_bits": _widths(instructions, "LDG", "LDGSTS"),
            "store_bits": _widths(instructions, "STG"),
            "instructions": len(instructions),
            "seconds": seconds,
        }


_run, _compile = JITFunction.run, JITFunction._do_compile


def record_launches(launched: Callable[[Specialization, Grid], None]) -> None:
    """From now on call `launched` instead of launching a kernel."""
    known: dict[tuple[int, Any], Specialization] = {}

    def recorded(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        mocks = {key: _mock(value) for key, value in kwargs.items()}
        version = _run(self, *map(_mock, args), grid=grid, warmup=True, **mocks)
        if not isinstance(version, Specialization):
            raise RuntimeError(f"triton {triton.__version__} compiles kernels in another way than this module expects")
        version.arguments = version.arguments or " ".join(
            [*(f"{key}={_shown(value)}" for key, value in kwargs.items()), *map(_shown, args)]
        )
        if callable(grid):
            grid = grid(dict(zip(self.arg_names, args, strict=False)) | kwargs)
        launched(version, tuple(grid))

    def compile_later(self: JITFunction, key: Any, *rest: Any) -> Specialization:
        return known.setdefault((id(self), key), Specialization(self, (key, *rest)))

    JITFunction.run, JITFunction._do_compile = recorded, compile_later
    # nothing can be timed, so autotuning takes the first configuration
    Autotuner._bench = lambda *_, **__: [0.0, 0.0, 0.0]


def _mock(x: Any) -> Any:
    """Return an argument as Triton sees it; the address of a tensor is its offset in its storage."""
    if hasattr(x, "_fields"):
        return type(x)(*map(_mock, x))
    if not isinstance(x, torch.Tensor):
        return tuple(map(_mock, x)) if isinstance(x, tuple | list) else x
    tensor, address = MockTensor(x.dtype, list(x.shape)), x.storage_offset() * x.element_size()
    tensor.data_ptr = lambda: address
    return tensor


def _shown(x: Any) -> str:
    if isinstance(x, tuple | list):
        return f"{len(x)} x {_shown(x[0])}" if x else "()"
    if isinstance(x, torch.Tensor):
        text = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}".replace(" ", "")
        misaligned = x.storage_offset() * x.element_size() % 16
        return f"{text}+{misaligned}B" if misaligned else text
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def _widths(instructions: list[str], *names: str) -> dict[int, int]:
    """Return the number of memory accesses of each width, in bits per thread."""
    accesses = [name.split(".")[1:] for name in instructions if name.split(".")[0] in names]
    widths = [[part.lstrip("US") for part in parts if re.fullmatch(r"[US]?(8|16|64|128)", part)] for parts in accesses]
    return dict(sorted(Counter(int((width or ["32"])[0]) for width in widths).items(), reverse=True))
