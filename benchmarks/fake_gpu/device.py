"""Makes PyTorch's CPU build and Triton behave as on a machine with one H100."""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")
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


def install() -> None:
    """Install the fake GPU. Call this once, before torch and triton are imported.

    Raises: RuntimeError for PyTorch's CUDA build, or if device.cpp does not compile.
    """
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
