"""A forward and backward pass of a decoder or of an operator on fake tensors: launches, synchronizations and memory."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

from benchmarks.fake_gpu import launches
from benchmarks.fake_gpu.launches import Specialization
from depthlm.accounting.tracing import trace
from depthlm.build import build_model
from depthlm.config import Config, compose
from depthlm.model import Decoder, compile_sublayers
from depthlm.ops.library import FUNCTIONS

GIB = 2**30
# operators that launch more than one kernel
LAUNCHES = {"_fused_rms_norm_backward": 2}
# bytes per parameter of AdamW's states; with 16-bit weights, of their fp32 copies too
ADAMW = {"autocast": 8, "bf16": 12}
# kernels that get a table of sources, and write the gradients of the sources to the addresses in it
WRITE_GRADIENTS = ("attention_residuals_backward", "dca_source_grads", "denseformer_backward")
PACKAGE = Path(__file__).parents[2] / "depthlm"
# modules between the caller of an operator and the mode that counts it
INTERMEDIATE = (__name__, "torch._compile", "torch._dynamo.eval_frame", "torch._ops", "torch.utils._python_dispatch")


def rehearse(overrides: list[str], micro_batch_size: int, precision: str, compiled: bool, code: bool) -> dict[str, Any]:
    """Return the memory and work of one micro-batch of a configuration. Call `benchmarks.rehearsal.prepare` first.

    precision: autocast: fp32 weights under bf16 autocast, as at ZeRO 0; bf16: bf16 weights, as at ZeRO 1 and above.
    compiled: whether torch.compile compiles the sublayers; the estimate is that of a step without it.
    code: whether to compile each version of the Triton kernels and to inspect its machine code.
    Raises: RuntimeError where the host needs a shape that depends on values.
    """
    config = compose(overrides, here=False)
    model, counter = model_of(config), LaunchCounter()
    launches.record_launches(counter.launched)
    dtype = torch.float32 if precision == "autocast" else torch.bfloat16
    with FakeTensorMode(allow_non_fake_inputs=True):
        model._apply(lambda x: torch.empty(x.shape, dtype=dtype if x.is_floating_point() else x.dtype, device="cuda"))
        weights = {counter.hold(x) for x in (*model.parameters(), *model.buffers())}
        if compiled:
            compile_regions(model, counter)
        tokens = torch.zeros(micro_batch_size, config.training.sequence_length + 1, dtype=torch.long, device="cuda")
        autocast = torch.autocast("cuda", dtype=torch.bfloat16) if precision == "autocast" else nullcontext()
        # as in a graph; the exact number would depend on values
        model.max_documents = 4 * micro_batch_size
        with counter, autocast, torch.autograd.graph.saved_tensors_hooks(counter.save, lambda x: x):
            loss = model(tokens[:, :-1], tokens[:, 1:], seeds_b=tokens[:, 0].int())
        saved = sum(counter.held[key] for key in counter.saved - weights)
        counter.phase = "backward"
        with counter:
            loss.nll.backward()
    parameters = sum(x.numel() for x in model.parameters())
    line = {
        "preset": config.model.name,
        "size": config.size.name,
        "micro_batch_size": micro_batch_size,
        "sequence_length": config.training.sequence_length,
        "precision": precision,
        "compiled": compiled,
        "activation_checkpointing": config.training.activation_checkpointing,
        "parameters": parameters,
        "parameters_without_gradient": sum(x.grad is None for x in model.parameters()),
        "launches": counter.launches.total(),
        **{f"launches_{kind}": count for kind, count in counter.launches.items()},
        "gradient_sums": counter.gradient_sums,
        "host_synchronizations": counter.synchronizations,
        "saved_gib": saved / GIB,
        "peak_gib": (counter.peak + ADAMW[precision] * parameters) / GIB,
        "moved_gb": counter.moved / 1e9,
        "compilations": len(counter.triton),
        "operators": dict(counter.operators.most_common()),
    }
    if not compiled:
        line |= estimate(config, micro_batch_size, precision)
    if code:
        versions = sorted(counter.triton.items(), key=lambda item: item[0].kernel)
        line["machine_code"] = [
            {"kernel": x.kernel, "arguments": x.arguments, "launches": count, **x.inspect()} for x, count in versions
        ]
    return line


def model_of(config: Config) -> Decoder:
    """Return the decoder as it is trained, without weights."""
    model = build_model(config, "meta")
    model.checkpoint_activations(config.training.activation_checkpointing)
    model.mask_documents(config.data.document_mask, 0)
    return model


def estimate(config: Config, micro_batch_size: int, precision: str) -> dict[str, float]:
    """Return the estimate of `depthlm summary` for the same micro-batch."""
    model = model_of(config)
    if precision == "bf16":
        model.to(torch.bfloat16)
    autocast = torch.bfloat16 if precision == "autocast" else None
    traced = trace(model, "cuda", micro_batch_size, config.training.sequence_length, autocast)
    states = sum(x.numel() * (x.itemsize + ADAMW[precision]) for x in model.parameters())
    return {"estimated_saved_gib": traced.saved / GIB, "estimated_peak_gib": (traced.peak + states) / GIB}


def compile_regions(model: Decoder, counter: "LaunchCounter") -> None:
    """Compile the sublayers, the head and the loss, and let the counter count their launches."""
    # otherwise the compilations of earlier rehearsals count towards the limit of recompilations
    torch._dynamo.reset()
    compile_function = torch.compile

    def compile_without_counter(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        # torch.compile does not compile under a dispatch mode
        compiled = compile_function(function, **settings)

        def call(*arguments: Any) -> Any:
            with _pop_mode_temporarily():
                return compiled(*arguments)

        return call

    with mock.patch("torch.compile", compile_without_counter):
        compile_sublayers(model, backend=launches.backend(counter.region))


class Traffic(NamedTuple):
    """launches and moved: of the forward and the backward pass. saved: bytes kept for the backward pass, inputs aside.

    kernels: the launches of each version of a Triton kernel. A tensor counts once per launch, or twice if the launch
    adds to it.
    """

    launches: int
    moved: int
    saved: int
    kernels: Counter[Specialization]


def measure_traffic(run: Callable[[], Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> Traffic:
    """Trace a forward and a backward pass with gradients of all outputs. Call this in a FakeTensorMode."""
    counter, tables, moved = LaunchCounter(), {}, 0

    def launched(version: Specialization, arguments: dict[str, Any]) -> None:
        nonlocal moved
        counter.launched(version, arguments)
        moved += launch_bytes(version.function.fn.__name__, arguments, tables)

    launches.record_launches(launched)
    given = {counter.hold(x) for x in inputs}
    with counter, torch.autograd.graph.saved_tensors_hooks(counter.save, lambda x: x):
        outputs = run()
    saved = sum(counter.held[key] for key in counter.saved - given if key in counter.held)
    counter.phase = "backward"
    with counter:
        torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])
    return Traffic(counter.launches.total(), moved + counter.moved, saved, counter.triton)


def launch_bytes(name: str, arguments: dict[str, Any], tables: dict[int, dict[str, Any]]) -> int:
    """Return the bytes that a launch moves. tables: by the storage of a table, the launch that wrote it."""
    if name == "reads_write_table":
        tables[_storage(arguments["table_ptr"])] = arguments
        return arguments["table_ptr"].nbytes
    tensors = {_storage(x): x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)}
    of_table = next((tables[key] for key in tensors if key in tables), None)
    pointers = of_table or (arguments if "x_ptrs" in arguments else None)
    total = sum(x.nbytes for x in tensors.values())
    if pointers is not None:
        sources, grads = ({_storage(x): x for x in pointers.get(key, ())} for key in ("x_ptrs", "grad_ptrs"))
        writes = of_table is None or name in WRITE_GRADIENTS
        added = [x for j, x in enumerate(grads.values()) if pointers["added"] >> j & 1]
        if of_table is not None:
            total += sum(x.nbytes for x in sources.values())
            total += sum(x.nbytes for x in grads.values()) if writes else 0
        total += sum(x.nbytes for x in added) if writes else 0
    return total


class LaunchCounter(TorchDispatchMode):
    """Counts launches, host synchronizations and bytes, also inside the operators of depthlm.ops.library."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        kinds = (f"{phase}_{kind}" for phase in ("forward", "backward") for kind in ("pytorch", "triton", "compiled"))
        self.launches: Counter[str] = Counter(dict.fromkeys(kinds, 0))
        self.operators: Counter[str] = Counter()
        self.synchronizations: Counter[str] = Counter()
        self.triton: Counter[Specialization] = Counter()
        self.held: dict[int, int] = {}
        self.saved: set[int] = set()
        self.gradient_sums = self.live = self.peak = self.moved = 0
        self.in_region = False

    def launched(self, version: Specialization, arguments: dict[str, Any]) -> None:
        self.launches[f"{self.phase}_triton"] += 1
        self.triton[version] += 1

    def region(self, launches: int, run: Callable[[], Any]) -> Any:
        """Run a compiled region, and count the launches of its generated code instead of its operators."""
        self.launches[f"{self.phase}_compiled"] += launches
        # the forward pass of a region runs without this mode, the backward pass with it
        with self.inside(True), self if self.phase == "forward" else nullcontext():
            return run()

    @contextmanager
    def inside(self, region: bool) -> Iterator[None]:
        before, self.in_region = self.in_region, region
        yield
        self.in_region = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, (namespace, _, name) = kwargs or {}, func._schema.name.partition("::")
        if self.in_region and namespace in ("aten", "prims", "prim", "inductor_prims"):
            result = func(*args, **kwargs)
            self.count(func._schema, name, (args, kwargs), result)
            return result
        if function := FUNCTIONS.get(func._schema.name):
            # a registered operator is not compiled, also inside a compiled region
            with self, self.inside(False):
                return function(*args, **kwargs)
        if namespace == "prim":
            return func(*args, **kwargs)
        if namespace != "aten":
            raise RuntimeError(
                f"{namespace}::{name} was not registered by depthlm.ops.library, so it cannot be counted"
            )
        if func._can_decompose() and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA"):
            with self:
                return func.decompose(*args, **kwargs)
        # an index of numbers, unlike one of truth values, has as many results as numbers
        numbered = name == "index" and all(i is None or i.dtype != torch.bool for i in args[1])
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags) and not numbered:
            place = f"{name} at {_calling_line()}"
            self.synchronizations[place] += 1
            if name != "_local_scalar_dense":
                raise RuntimeError(f"the shape of {place} depends on values, and fake tensors have none")
            return True if args[0].dtype is torch.bool else 1.0 if args[0].is_floating_point() else 1
        result = func(*args, **kwargs)
        self.count(func._schema, name, (args, kwargs), result)
        return result

    def count(self, schema: Any, name: str, arguments: Any, result: Any) -> None:
        before, after = ([x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)] for tree in (arguments, result))
        known = {x.untyped_storage()._cdata for x in before}
        new = [x for x in after if self.hold(x) not in known and x.is_cuda and x.numel()]
        written = schema.is_mutable and any(x.is_cuda for x in before)
        if (new or written) and not self.in_region and not name.removeprefix("new_").startswith("empty"):
            self.launches[f"{self.phase}_pytorch"] += LAUNCHES.get(name, 1)
            self.moved += sum(x.numel() * x.itemsize for x in (*before, *after) if x.is_cuda)
            self.operators[f"{self.phase} {name}"] += 1
            self.gradient_sums += self.phase == "backward" and name in ("add", "add_") and _called_by_autograd()
        copied = name in ("_to_copy", "copy_") and {x.device.type for x in (*before, *after)} == {"cpu", "cuda"}
        if copied and not arguments[1].get("non_blocking"):
            self.synchronizations[f"{name} at {_calling_line()}"] += 1

    def hold(self, x: torch.Tensor) -> int:
        """Count the memory of a tensor until it is freed. Return the key of its storage."""
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if x.is_cuda and key not in self.held:
            self.held[key] = size
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.release, key).atexit = False
        return key

    def release(self, key: int) -> None:
        self.live -= self.held.pop(key)
        self.saved.discard(key)

    def save(self, x: torch.Tensor) -> torch.Tensor:
        self.saved.add(self.hold(x))
        return x


def _called_by_autograd() -> bool:
    """Return whether autograd itself calls the current operator."""
    frame = sys._getframe(1)
    while frame and frame.f_globals["__name__"] in INTERMEDIATE:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def _calling_line() -> str:
    """Return the file and line of the package that calls the current operator."""
    frame = sys._getframe(1)
    while frame and not Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{Path(frame.f_code.co_filename).relative_to(PACKAGE.parent)}:{frame.f_lineno}" if frame else "autograd"


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata
