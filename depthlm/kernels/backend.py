"""Which code an operator runs: the PyTorch that defines it, or the Triton kernels that must equal it."""

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from contextvars import ContextVar, Token
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from depthlm.kernels import CHOICES

FUSED_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_choice: ContextVar[str] = ContextVar("kernels", default="auto")


class using:
    """Inside, operators take Triton kernels ("triton"), PyTorch ("torch"), or Triton on a GPU where it can ("auto").

    May be entered again and again, as recomputation for a second backward pass does. A decoder enters its own choice,
    `Decoder.kernels`.
    Raises: ValueError for another choice.
    """

    def __init__(self, choice: str):
        if choice not in CHOICES:
            raise ValueError(f"kernels={choice}: must be one of {', '.join(CHOICES)}")
        self.choice = choice
        self.tokens: list[Token[str]] = []

    def __enter__(self) -> None:
        self.tokens.append(_choice.set(self.choice))

    def __exit__(self, *raised: object) -> None:
        _choice.reset(self.tokens.pop())


def chosen() -> str:
    """The choice that holds here. A backward pass runs outside, and asks for that of its forward pass."""
    return _choice.get()


def interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on the CPU: correct, and slow beyond any use but tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def gpu_capability() -> tuple[int, int]:
    """The compute capability of this machine's GPU. Without one, as where the memory of another machine is estimated,
    that of an H100."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


@cache
def missing(device: str) -> str | None:
    """What Triton kernels lack on this kind of device; None: nothing."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device == "cpu" and interpreted():
        return None
    if device == "cuda" and gpu_capability() < (8, 0):
        return "Triton needs a GPU of compute capability 8.0 or newer"
    if device == "cuda":
        # nothing is launched where there is no GPU
        return launch_lacks() if torch.cuda.is_available() else None
    return f"Triton runs on a GPU, not on {device} (for tests: TRITON_INTERPRET=1)"


def launch_lacks() -> str | None:
    """What Triton lacks to compile its launcher, which it does at its first launch on a GPU, and what to install.

    As triton/runtime/build.py and triton/backends/nvidia/driver.py of Triton 3.7.1 look for it.
    """
    compiler = os.environ.get("CC")
    if compiler is not None and shutil.which(compiler) is None:
        return f"CC={compiler} is no program, and Triton compiles its launcher with it; export CC=<a C compiler>"
    if compiler is None and not (shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler for its launcher; install gcc (Debian, Ubuntu: apt install gcc)"
    if not Path(python_headers(), "Python.h").is_file():
        return (
            f"Triton needs Python's headers for its launcher, and {python_headers()} has no Python.h; install them "
            f"(Debian, Ubuntu: apt install python3.{sys.version_info.minor}-dev), or use conda's Python"
        )
    if not _finds_driver():
        return "Triton does not find the driver's libcuda.so.1; export TRITON_LIBCUDA_PATH=<the folder that it is in>"
    return None


def python_headers() -> str:
    """The folder in which Triton looks for Python.h."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a folder that need not exist
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
    """Whether the Triton kernels of an operator take these tensors.

    unsupported: why they cannot, of this shape. With kernels=auto one line per reason says that PyTorch is taken.
    Raises: ValueError with kernels=triton where they cannot.
    """
    choice = _choice.get()
    tensors = list(tensors)
    device = "cuda" if tensors[0].is_cuda else tensors[0].device.type
    if choice == "torch" or (choice == "auto" and device != "cuda"):
        return False
    lack = missing(device)
    if lack is not None and choice == "auto":
        _say_once("the operators over depth run", lack)
        return False
    reason = lack or unsupported
    if reason is None and (kinds := {x.dtype for x in tensors if x.dtype not in FUSED_TYPES}):
        reason = f"{', '.join(map(str, kinds))} is not fp32, fp16 or bf16"
    if reason is not None and choice == "triton":
        raise ValueError(f"kernels=triton: {operator}: {reason}; allowed: kernels=torch, or auto")
    if reason is not None:
        _say_once(f"{operator} runs", reason)
    return reason is None


@cache
def _say_once(what: str, reason: str) -> None:
    logging.getLogger(__name__).warning("kernels=auto: %s in PyTorch: %s", what, reason)


def expect(operator: str, like: Tensor, **arguments: tuple[Tensor, Sequence[int]]) -> None:
    """The check at an operator's door: each argument (tensor, wanted shape) has that shape, a type that Triton kernels
    compute with, and the device of `like`.

    Raises: ValueError for a shape or a device, TypeError for a type.
    """
    for name, (tensor, shape) in arguments.items():
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{operator}: {name} is {list(tensor.shape)}, must be {list(shape)}")
        if tensor.dtype not in FUSED_TYPES:
            raise TypeError(f"{operator}: {name} is {tensor.dtype}, must be fp32, fp16 or bf16")
        if tensor.device != like.device:
            raise ValueError(f"{operator}: {name} is on {tensor.device}, must be on {like.device}")
