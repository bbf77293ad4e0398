"""Triton launches on CPU tensors: compiled for a GPU as Triton's runtime would compile them, and run by the machine."""

import os
import struct
import tempfile
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# of the numbers that a kernel takes; `None` and the like are constants in its code
FORMATS = {"i1": "<i", "i32": "<i", "i64": "<q", "u32": "<I", "u64": "<Q", "fp32": "<f"}


class Launcher:
    """Takes the place of Triton's launches. edges: as in `grid.programs`."""

    def __init__(self) -> None:
        os.environ.pop("TRITON_INTERPRET", None)
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"ptx_machine-{os.getuid()}"))
        import torch
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.compiler import CUDABackend
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        from .reports import Reports

        # machine code is not needed, and a cache with empty code must not be used for anything else
        CUDABackend.make_cubin = lambda *_: b""
        device = {
            "get_current_target": lambda: GPUTarget("cuda", 80, 32),
            "get_current_device": lambda: 0,
            "get_current_stream": lambda *_: 0,
            "get_active_torch_device": lambda: torch.device("cpu"),
        }
        driver.set_active(SimpleNamespace(**device))
        self.torch, self.compiled_run = torch, JITFunction.run
        self.reports, self.edges = Reports(), False
        self.programs: dict[str, Any] = {}
        self.known: dict[int, tuple[int, int, Any]] = {}
        self.launches: Counter[str] = Counter()
        # what nobody has written is NaN
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        self.all_faults: Counter[str] = Counter()
        self.all_notes: Counter[str] = Counter()
        launcher = self

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return launcher.run(function, args, grid, kwargs)

        JITFunction.run = run

    def run(self, function: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> Any:
        from triton import knobs

        from . import ptx
        from .grid import launch
        from .machine import Program

        compiled = self.compiled_run(function, *args, grid=grid, warmup=True, **kwargs)
        options = kwargs | {"debug": bool(function.debug or knobs.runtime.debug)}
        options["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        bound, specialization, _ = function.device_caches[0][4](*args, **options)
        text, values = compiled.asm["ptx"], []
        flatten(list(bound.values()), [kind for kind, *_ in specialization], values)
        if compiled.hash not in self.programs:
            self.programs[compiled.hash] = Program(ptx.parse(text))
        program = self.programs[compiled.hash]
        for value, _ in values:
            if isinstance(value, self.torch.Tensor):
                self.remember(value)
        parameters = {}
        for k, (name, _) in enumerate(program.kernel.parameters):
            parameters[name] = packed(*values[k]) if k < len(values) else bytes(8)
        if len(values) + 2 != len(parameters):
            raise RuntimeError(f"{len(values)} arguments for {len(parameters)} parameters")
        name = function.fn.__name__
        self.launches[name] += 1
        self.reports.kernel = name
        sizes = tuple(grid(bound)) if callable(grid) else tuple(grid)
        ranges = [(start, end) for start, end, alive in self.known.values() if alive() is not None]
        settings = compiled.metadata
        shape = settings.shared, settings.num_warps
        launch(program, sizes, parameters, ranges, *shape, self.reports, self.edges)
        return compiled

    def begin(self) -> None:
        """From now on, report to new lists."""
        from .reports import Reports

        self.reports = Reports(self.all_faults, self.all_notes)

    def remember(self, x: Any) -> None:
        """A kernel may use what a tensor covers, also in later launches, to which a table may give its address."""
        if not x.numel():
            return
        start = x.data_ptr()
        extent = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1
        storage = x.untyped_storage()
        key = (start, extent * x.element_size())
        if key not in self.known or self.known[key][2]() is None:
            self.known[key] = (start, start + extent * x.element_size(), weakref.ref(storage))
        if len(self.known) > 2000:
            self.known = {k: v for k, v in self.known.items() if v[2]() is not None}


def flatten(values: list[Any], kinds: list[Any], found: list[tuple[Any, str]]) -> None:
    """Add the arguments that a compiled kernel has, with their types; the others are constants in its code."""
    for value, kind in zip(values, kinds, strict=True):
        if isinstance(kind, (tuple, list)):
            flatten(list(value), list(kind), found)
        elif kind != "constexpr":
            found.append((value, kind))


def packed(value: Any, kind: str) -> bytes:
    if kind.startswith("*"):
        return struct.pack("<Q", value if isinstance(value, int) else value.data_ptr())
    return struct.pack(FORMATS[kind], value)
