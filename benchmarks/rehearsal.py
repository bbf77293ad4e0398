"""What a training step of a preset requires of an H100, computed on a machine without a GPU.

    python benchmarks/rehearsal.py [--size 1.5b,3b] [--presets moda,dca] [--compile] [--code] [overrides]

Runs one forward and one backward pass of a micro-batch on fake CUDA tensors, which have shapes but no values, and
counts launches and bytes. With --code it compiles every Triton kernel for sm_90 with its real arguments, and counts
registers and spills. Needs PyTorch's CPU build, triton and a C++ compiler. `benchmarks/README.md` describes the columns
and what a rehearsal cannot show.
"""

import atexit
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.shared.reporting import Results, arguments_of, error_text, parser_of, result_path, table, write_json

PRESETS = ("vanilla", "depth_attention", "moda", "attention_residuals", "attention_residuals_full", "dca",
           "denseformer", "mhc", "hyper_connections")  # fmt: skip
# sequences
MICRO_BATCH = 8
SOURCE = Path(__file__).parent / "fake_gpu" / "device.cpp"
# what PyTorch and Inductor ask of an H100
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    gcnArchName="",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
)
# registrations end with their library object
_libraries: list[Any] = []
# the columns of the tables, by key
STEP = {
    "preset": "preset",
    "size": "size",
    "launches": "launches",
    "launches_forward_triton": "Triton",
    "launches_backward_triton": "backward",
    "gradient_sums": "sums",
    "moved_gb": "GB",
    "saved_gib": "saved",
    "estimated_saved_gib": "estimate",
    "peak_gib": "peak",
    "estimated_peak_gib": "estimate",
    "compilations": "compiled",
}
CODE = {
    "kernel": "kernel",
    "warps": "warps",
    "registers": "registers",
    "stack": "stack",
    "blocks_per_sm": "blocks/SM",
    "load_bits": "load bits",
}


def prepare() -> None:
    """Let PyTorch and Triton behave as on a machine with one H100. Call this once, before they are imported.

    Triton compiles into a temporary folder. Raises: RuntimeError for PyTorch's CUDA build, or if device.cpp does not
    compile.
    """
    warnings.filterwarnings("ignore")
    os.environ |= {"DS_ACCELERATOR": "cpu", "TRITON_CACHE_DIR": tempfile.mkdtemp(prefix="depthlm-triton-")}
    os.environ.pop("TRITON_INTERPRET", None)
    atexit.register(shutil.rmtree, os.environ["TRITON_CACHE_DIR"], ignore_errors=True)
    _load_backend()
    import torch

    if torch.version.cuda is not None:
        raise RuntimeError(f"the rehearsal needs PyTorch's CPU build, and this is {torch.__version__}")
    answers: dict[str, Any] = {
        "get_device_properties": PROPERTIES,
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
        "current_device": 0,
        "device": nullcontext(),
        "device_of": nullcontext(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    # PyTorch only checks whether these kernels exist; without them, it decomposes the operators
    library = torch.library.Library("aten", "IMPL", "CUDA")
    for operator in ("_fused_rms_norm", "silu_backward"):
        library.impl(operator, lambda *_: None)
    _libraries.append(library)

    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda *_: 0,
            get_active_torch_device=lambda: torch.device("cuda", 0),
        )
    )


def _load_backend() -> None:
    """Load device.cpp, which has to happen before torch initializes. The first call compiles it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("the rehearsal needs torch")
    torch, version = Path(spec.origin).parent, importlib.metadata.version("torch")
    digest = hashlib.sha256(f"{version} {torch} {SOURCE.read_text()}".encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"depthlm-fake-gpu-{os.getuid()}" / f"device-{digest}.so"
    if not library.exists():
        compiler = next(filter(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++")), None)
        if compiler is None:
            raise RuntimeError("the rehearsal needs a C++ compiler; set CXX, or install g++")
        library.parent.mkdir(mode=0o700, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        folders = [f"-I{torch}/include", f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib"]
        options = ["-O1", "-std=c++20", "-shared", "-fPIC", *folders, "-o", unfinished, SOURCE, "-lc10", "-ltorch_cpu"]
        done = subprocess.run([compiler, *options], capture_output=True, text=True)
        if done.returncode:
            error = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
            raise RuntimeError(f"{SOURCE.name} does not compile against torch {version}: {error}")
        unfinished.rename(library)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def markdown(results: Results) -> str:
    """Return a table of the steps, and one of the kernels with the largest values of all of their versions."""
    largest: dict[str, dict[str, Any]] = {}
    for version in (version for line in results["lines"] for version in line.get("machine_code", ())):
        worst = largest.setdefault(version["kernel"], dict(version))
        worst |= {key: max(worst[key], version[key]) for key in ("registers", "stack")}
        worst["blocks_per_sm"] = min(worst["blocks_per_sm"], version["blocks_per_sm"])
    tables = [table(STEP.values(), ([cell(line.get(key, "")) for key in STEP] for line in results["lines"]))]
    if largest:
        tables.append(table(CODE.values(), ([cell(largest[name][key]) for key in CODE] for name in sorted(largest))))
    return "\n\n".join(tables)


def cell(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}:{count}" for key, count in value.items())
    return f"{value:.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("overrides", nargs="*", help="as for train.py, such as training.activation_checkpointing=true")
    # separated by commas: with spaces, overrides would be taken for further values
    parser.add_argument("--presets", default=",".join(PRESETS), help="separated by commas (default: %(default)s)")
    parser.add_argument("--size", default="1.5b", help="sizes, separated by commas (default: %(default)s)")
    parser.add_argument(
        "--precision",
        choices=("autocast", "bf16"),
        default="autocast",
        help="autocast: fp32 weights, as at ZeRO 0; bf16: bf16 weights, as at ZeRO 1 and above (default: %(default)s)",
    )
    parser.add_argument("--compile", action="store_true", help="count launches with training.compile=true")
    parser.add_argument("--code", action="store_true", help="compile the Triton kernels for sm_90")
    arguments = arguments_of(parser, markdown)
    try:
        prepare()
    except RuntimeError as error:
        parser.error(str(error))

    from rich.progress import track

    from benchmarks.fake_gpu.step import rehearse

    jobs = [(preset, size) for size in arguments.size.split(",") for preset in arguments.presets.split(",")]
    lines, errors = [], []
    for preset, size in track(jobs, "rehearsing", transient=True):
        overrides = [f"model={preset}", f"size={size}", "kernels=triton", *arguments.overrides]
        settings = MICRO_BATCH, arguments.precision, arguments.compile, arguments.code
        try:
            lines.append(rehearse(overrides, *settings))
        except Exception as error:
            # the other presets may succeed
            errors.append(f"{' '.join(overrides)}: {error_text(error)}")
    output = arguments.output or result_path("rehearsal")
    print(markdown(write_json(output, {"lines": lines, "errors": errors})))
    for line in lines:
        for place, count in line["host_synchronizations"].items():
            print(f"{line['preset']}: host synchronization: {place}, {count} times")
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    print(f"written to {output}")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
