"""The choice among the implementations of an operator: its definition, faster PyTorch, and Triton kernels."""

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar, Token
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from depthlm.ops import KernelChoice

FUSED_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_choice: ContextVar[str] = ContextVar("kernels", default="auto")
P = ParamSpec("P")
R = TypeVar("R")


class using:
    """A context in which operators run in Triton ("triton"), in PyTorch ("torch") or as their definitions ("naive").

    "auto" runs Triton kernels on a GPU, and PyTorch where they cannot run. The context may be entered repeatedly, which
    the recomputation for a second backward pass does. A decoder enters its own choice, `Decoder.kernels`.
    Raises: ValueError for any other choice.
    """

    def __init__(self, choice: str):
        if choice not in get_args(KernelChoice):
            raise ValueError(f"kernels={choice}: must be one of {', '.join(get_args(KernelChoice))}")
        self.choice = choice
        self.tokens: list[Token[str]] = []

    def __enter__(self) -> None:
        self.tokens.append(_choice.set(self.choice))

    def __exit__(self, *raised: object) -> None:
        _choice.reset(self.tokens.pop())


def current_choice() -> str:
    """Return the current choice. A backward pass runs outside the context, so it stores that of its forward pass."""
    return _choice.get()


def interpreted() -> bool:
    """Return whether Triton kernels run in Triton's interpreter on the CPU, which is fast enough only for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def gpu_capability() -> tuple[int, int]:
    """Return the compute capability of this machine's GPU.

    Without a GPU, for example when the memory of another machine is estimated, it is that of an H100.
    """
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


@cache
def missing(device: str) -> str | None:
    """Return why Triton kernels cannot run on this type of device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device == "cpu" and interpreted():
        return None
    if device == "cuda" and gpu_capability() < (8, 0):
        return "Triton needs a GPU of compute capability 8.0 or newer"
    if device == "cuda":
        # without a GPU, nothing is launched
        return launch_lacks() if torch.cuda.is_available() else None
    return f"Triton runs on a GPU, not on {device} (for tests: TRITON_INTERPRET=1)"


def launch_lacks() -> str | None:
    """Return why Triton cannot compile its launcher and what to install, or None.

    Triton compiles it at the first launch on a GPU. The checks are those of triton/runtime/build.py and
    triton/backends/nvidia/driver.py in Triton 3.7.1.
    """
    compiler = os.environ.get("CC")
    if compiler is not None and shutil.which(compiler) is None:
        return f"CC={compiler} is not a program, but Triton compiles its launcher with it; export CC=<a C compiler>"
    if compiler is None and not (shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler for its launcher; install gcc (Debian, Ubuntu: apt install gcc)"
    if not Path(python_headers(), "Python.h").is_file():
        return (
            f"Triton needs Python's headers for its launcher, and {python_headers()} has no Python.h; install them "
            f"(Debian, Ubuntu: apt install python3.{sys.version_info.minor}-dev), or use conda's Python"
        )
    if not _finds_driver():
        return "Triton does not find the driver's libcuda.so.1; export TRITON_LIBCUDA_PATH=<the folder that has it>"
    return None


def python_headers() -> str:
    """Return the folder in which Triton looks for Python.h."""
    scheme = sysconfig.get_default_scheme()
    # the folder of Debian's own scheme may not exist
    return sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]


def _finds_driver() -> bool:
    if folder := os.environ.get("TRITON_LIBCUDA_PATH"):
        return Path(folder, "libcuda.so.1").is_file()
    try:
        known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return "libcuda.so.1" in known or any(Path(folder, "libcuda.so.1").is_file() for folder in folders if folder)


def fused(operator: str, tensors: Iterable[Tensor], unsupported: str | None = None) -> bool:
    """Return whether to run the Triton kernels of an operator on these tensors.

    unsupported: why the kernels do not support these shapes; None: they do. With kernels=auto, each reason to run
    PyTorch instead is logged once.
    Raises: ValueError with kernels=triton if the kernels cannot run.
    """
    choice = _choice.get()
    tensors = list(tensors)
    device = "cuda" if tensors[0].is_cuda else tensors[0].device.type
    if choice in ("torch", "naive") or (choice == "auto" and device != "cuda"):
        return False
    reason_missing = missing(device)
    if reason_missing is not None and choice == "auto":
        _say_once("the operators over depth run", reason_missing)
        return False
    reason = reason_missing or unsupported
    if reason is None and (dtypes := {x.dtype for x in tensors if x.dtype not in FUSED_TYPES}):
        reason = f"{', '.join(map(str, dtypes))} is not fp32, fp16 or bf16"
    if reason is not None and choice == "triton":
        raise ValueError(f"kernels=triton: {operator}: {reason}; allowed: kernels=torch, or auto")
    if reason is not None:
        _say_once(f"{operator} runs", reason)
    return reason is None


def operator(
    name: str,
    *,
    triton: Callable[[], Callable[..., Any]],
    cpu: Callable[..., Any] | None = None,
    unsupported: Callable[..., str | None] = lambda *_, **__: None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for the definition of an operator; the result chooses an implementation for each call.

    triton: imports the function that runs Triton kernels, and returns it. cpu: an implementation in PyTorch that is
    faster than the definition; None: without Triton, the definition runs.
    unsupported: returns why the kernels do not support these arguments, or None.
    `inspect.unwrap` returns the definition. All of these functions have the same parameters.
    """

    def decorate(naive: Callable[P, R]) -> Callable[P, R]:
        @wraps(naive)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if current_choice() == "naive":
                return naive(*args, **kwargs)
            if fused(name, _tensors([*args, *kwargs.values()]), unsupported(*args, **kwargs)):
                return triton()(*args, **kwargs)
            return (cpu or naive)(*args, **kwargs)

        return run

    return decorate


def _tensors(arguments: Iterable[object]) -> list[Tensor]:
    """Return the tensors among the arguments, and in their tuples and lists."""
    tensors = []
    for x in arguments:
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, tuple | list):
            tensors.extend(_tensors(x))
    return tensors


@cache
def _say_once(what: str, reason: str) -> None:
    logging.getLogger(__name__).warning("kernels=auto: %s in PyTorch: %s", what, reason)


def expect(operator: str, like: Tensor, **arguments: tuple[Tensor, Sequence[int]]) -> None:
    """Check the arguments of a Triton operator, each a pair (tensor, expected shape).

    Each must have that shape, a dtype of FUSED_TYPES, and the device of `like`.
    Raises: ValueError for a wrong shape or device, TypeError for a wrong dtype.
    """
    for name, (tensor, shape) in arguments.items():
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{operator}: {name} is {list(tensor.shape)}, must be {list(shape)}")
        if tensor.dtype not in FUSED_TYPES:
            raise TypeError(f"{operator}: {name} is {tensor.dtype}, must be fp32, fp16 or bf16")
        if tensor.device != like.device:
            raise ValueError(f"{operator}: {name} is on {tensor.device}, must be on {like.device}")
