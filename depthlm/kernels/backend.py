"""Which code an operator runs: the PyTorch that defines it, or the Triton kernels that must equal it."""

import importlib.util
import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from contextvars import ContextVar, Token
from functools import cache

import torch
from torch import Tensor

CHOICES = ("auto", "triton", "torch")
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
        compiler = os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))
        # nothing is launched where there is no GPU
        return None if compiler or not torch.cuda.is_available() else "Triton needs a C compiler to launch its kernels"
    return f"Triton runs on a GPU, not on {device} (for tests: TRITON_INTERPRET=1)"


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
    reason = missing(device) or unsupported
    if reason is None and (kinds := {x.dtype for x in tensors if x.dtype not in FUSED_TYPES}):
        reason = f"{', '.join(map(str, kinds))} is not fp32, fp16 or bf16"
    if reason is not None and choice == "triton":
        raise ValueError(f"kernels=triton: {operator}: {reason}; allowed: kernels=torch, or auto")
    if reason is not None:
        _say_once(operator, reason)
    return reason is None


@cache
def _say_once(operator: str, reason: str) -> None:
    logging.getLogger(__name__).warning("kernels=auto: %s runs in PyTorch: %s", operator, reason)


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
