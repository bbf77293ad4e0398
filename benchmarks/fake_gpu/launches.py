"""The launches of a step: those of Triton kernels, which are recorded, and those of compiled regions.

A Triton kernel can be compiled to machine code for sm_90, which is then inspected. For a compiled region, Inductor
generates the Python code that launches its kernels; the launches are counted in that code, and the kernels are not
compiled. The graphs themselves run on fake tensors, so that memory is counted as usual.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import detect_fake_mode
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction, MockTensor

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# of a multiprocessor of an H100: registers, warps, blocks, bytes of shared memory; of these, reserved per block
REGISTERS, WARPS, BLOCKS, SHARED, RESERVED = 65536, 64, 32, 233472, 1024

# calls in the generated code that launch a kernel: fused by Inductor, of a library, of a registered operator
GENERATED = re.compile(r"^\s+(?:\w+\.run|(?:\w+ = )?extern_kernels\.\w+|(?:\w+ = )?torch\.ops\.aten\.\w+\.\w+)\(", re.M)


class Specialization:
    """One version of a kernel, which Triton compiles at its first launch."""

    def __init__(self, function: JITFunction, compile_arguments: tuple[Any, ...]):
        self.function, self.compile_arguments, self.arguments = function, compile_arguments, ""
        module, name = function.fn.__module__, function.fn.__name__
        self.kernel = name if module.startswith("depthlm.") else f"{module}.{name}"

    def inspect(self) -> dict[str, Any]:
        """Compile this version; return its use of registers and stack, and the widths of its loads."""
        compiled = _compile(self.function, *self.compile_arguments)
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
        warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
        registers_of_block = -(-registers * 32 // 256) * 256 * warps
        return {
            "warps": warps,
            "registers": registers,
            "stack": stack,
            "blocks_per_sm": min(
                REGISTERS // registers_of_block, WARPS // warps, BLOCKS, SHARED // (shared + RESERVED)
            ),
            "load_bits": _widths(instructions, "LDG", "LDGSTS"),
        }


_run, _compile = JITFunction.run, JITFunction._do_compile


def record_launches(launched: Callable[[Specialization, dict[str, Any]], None]) -> None:
    """From now on, call `launched` with the version of a kernel and its arguments by name instead of launching it."""
    known: dict[tuple[int, Any], Specialization] = {}

    def recorded(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        mocks = {key: _mock(value) for key, value in kwargs.items()}
        version = _run(self, *map(_mock, args), grid=grid, warmup=True, **mocks)
        if not isinstance(version, Specialization):
            raise RuntimeError(f"triton {triton.__version__} compiles kernels in another way than this module expects")
        version.arguments = version.arguments or " ".join(
            [*(f"{key}={_text_of(value)}" for key, value in kwargs.items()), *map(_text_of, args)]
        )
        launched(version, dict(zip(self.arg_names, args, strict=False)) | kwargs)

    def compile_later(self: JITFunction, key: Any, *rest: Any) -> Specialization:
        return known.setdefault((id(self), key), Specialization(self, (key, *rest)))

    JITFunction.run, JITFunction._do_compile = recorded, compile_later
    # nothing can be timed, so autotuning takes the first configuration
    Autotuner._bench = lambda *_, **__: [0.0, 0.0, 0.0]


def _mock(x: Any) -> Any:
    """Return an argument as Triton sees it; the address of a tensor is its offset in its storage."""
    if isinstance(x, tuple | list):
        parts = map(_mock, x)
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if not isinstance(x, torch.Tensor):
        return x
    tensor, address = MockTensor(x.dtype, list(x.shape)), x.storage_offset() * x.element_size()
    tensor.data_ptr = lambda: address
    return tensor


def _text_of(x: Any) -> str:
    if isinstance(x, triton.language.constexpr):
        return _text_of(x.value)
    if hasattr(x, "_fields"):
        return " ".join(f"{name}={_text_of(value)}" for name, value in x._asdict().items())
    if isinstance(x, tuple | list):
        return f"{len(x)} x {_text_of(x[0])}" if x else "()"
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


def backend(region: Callable[[int, Callable[[], Any]], Any]) -> Any:
    """Return a backend of torch.compile that calls `region` for each region.

    It calls it with the number of launches of the region and a function that runs it.
    """
    torch.version.cuda = "13.0"  # type: ignore[attr-defined]
    config.compile_threads = 1
    scheduler.has_triton = lambda *_: True

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        # a backward pass may be lowered while its launches are counted
        with _disable_current_modes():
            launches = count_generated(graph, inputs)
        return lambda *arguments: region(launches, lambda: graph(*arguments))

    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=torch._functorch.partitioners.min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


def count_generated(graph: torch.fx.GraphModule, inputs: Any) -> int:
    """Return how many kernels Inductor's code for a graph launches."""
    fake_mode = detect_fake_mode(inputs)
    compile_fx.view_to_reshape(graph)
    with V.set_fake_mode(fake_mode):
        compile_fx.fake_tensor_prop(graph, inputs)
        post_grad_passes(graph, is_inference=False)
        compile_fx.fake_tensor_prop(graph, inputs)
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=fake_mode.shape_env, is_inference=False)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()), V.set_extern_kernel_nodes([]):
            lowering.run(*inputs)
            code, _ = lowering.codegen()
    return len(GENERATED.findall(getattr(code, "value", code)))
