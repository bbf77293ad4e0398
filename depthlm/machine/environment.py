"""The device, CPU cores and software versions of this process."""

import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import depthlm
from depthlm.errors import UserError
from depthlm.locations import IS_CHECKOUT, REPOSITORY
from depthlm.machine.gpu import probe, unusable

# the values of `device` in a configuration or a command
Device = Literal["auto", "cpu", "cuda"]


def device_type(choice: str = "auto") -> str:
    """Return `cuda` or `cpu`; `auto` is the GPU if torch can use one."""
    import torch

    return "cuda" if choice != "cpu" and torch.cuda.is_available() else "cpu"


def device_error(choice: str) -> str | None:
    """Return why the chosen device cannot be used, or why a GPU would stay idle; None if neither is the case."""
    if choice == "cpu" or device_type() == "cuda":
        return None
    if reason := unusable(probe()):
        return f"device={choice}: {reason}"
    if choice == "cuda":
        return "device=cuda: there is no NVIDIA GPU that this process may use; allowed here: auto, cpu"
    return None


def usable_device(choice: str) -> str:
    """Return `cuda` or `cpu`. Raises UserError if the choice cannot be used or a GPU would stay idle."""
    if error := device_error(choice):
        raise UserError(error)
    return device_type(choice)


def device_name(device: str) -> str:
    """Return the name of the GPU (`cuda`) or of the processor (`cpu`)."""
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(launcher: str, ranks_of_node: int) -> int:
    """Return the CPU threads of a rank: all its cores if srun bound it to some, else its share of the node's."""
    is_bound = launcher == "srun" and cores() < (os.cpu_count() or 1)
    return cores() if is_bound else max(1, cores() // ranks_of_node)


def fast_precision(device: str) -> str:
    """Return `bf16` if the device (`cuda` or `cpu`) multiplies it faster than fp32, else `fp32`.

    Without hardware support, bf16 can be 45 times slower.
    """
    import torch

    if device == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    capabilities = torch.cpu.get_capabilities()
    return "bf16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "fp32"


def versions() -> dict[str, str | None]:
    """Return the versions of depthlm and of the packages that it needs; None for one that is not installed."""
    packages = ("torch", "deepspeed", "hydra-core", "omegaconf", "tokenizers", "triton", "wandb", "numpy")
    return {"depthlm": depthlm.__version__} | {package: installed_version(package) for package in packages}


def installed_version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(device: str) -> dict[str, Any]:
    """Return the content of `environment.json`: versions, git commit, command, and the device (`cuda` or `cpu`)."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions(),
        "git": git_state(),
        "code": str(REPOSITORY),
        "command": sys.orig_argv,
        "device": device_name(device),
        "device_type": device,
        "cores": cores(),
    }


@functools.cache
def git_state() -> dict[str, Any] | None:
    """Return the commit of this checkout and whether files differ from it; None outside a checkout.

    A copy that was submitted to a cluster has this information in its git.json.
    """
    if (REPOSITORY / "git.json").is_file():
        return json.loads((REPOSITORY / "git.json").read_text())
    if not IS_CHECKOUT:
        return None

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=20
        )
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
