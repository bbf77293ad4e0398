"""Diagnose why torch cannot use an NVIDIA GPU that the machine has."""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# values of CUDA_VISIBLE_DEVICES that hide every GPU
NO_DEVICE = ("", "-1", "NoDevFiles")


@dataclass(frozen=True)
class Gpu:
    """The state of a machine's NVIDIA GPUs.

    devices: those that this process may open. driver: version of the kernel module. driver_cuda: newest CUDA
    (major, minor) that the driver's library supports; None: there is no such library. torch: version of torch.
    torch_cuda: CUDA version that torch is built for; None: it is built for the CPU. failure: torch's message why CUDA
    does not start. visible: CUDA_VISIBLE_DEVICES; None: not set.
    """

    devices: tuple[str, ...]
    driver: str | None
    driver_cuda: tuple[int, int] | None
    torch: str
    torch_cuda: str | None
    failure: str | None = None
    visible: str | None = None


def unusable(gpu: Gpu) -> str | None:
    """Return why torch does not use the machine's GPU, and the remedy.

    None if torch uses it, if there is no GPU, or if the user hid it.
    """
    hidden = gpu.visible is not None and gpu.visible.split(",")[0].strip() in NO_DEVICE
    if not gpu.devices or hidden or gpu.failure is None:
        return None
    has_gpu = f"this machine has an NVIDIA GPU ({gpu.devices[0]})"
    driver = f"its driver{f' {gpu.driver}' if gpu.driver else ''}"
    supported = "" if gpu.driver_cuda is None else f"{gpu.driver_cuda[0]}.{gpu.driver_cuda[1]}"
    if gpu.torch_cuda is None:
        build = f"a build for CUDA {supported} or older" if supported else "a build with CUDA"
        cpu_build = f"torch {gpu.torch} is built for the CPU only"
        return f"{has_gpu}, but {cpu_build}; install {build} (pytorch.org), or give device=cpu"
    if gpu.driver_cuda is None:
        return (
            f"{has_gpu}, but libcuda.so.1, the library of {driver}, was not found; install it (in a container, use "
            "--gpus or --nv), or give device=cpu"
        )
    major = gpu.torch_cuda.partition(".")[0]
    # within a major version, older drivers run newer CUDA
    if gpu.driver_cuda[0] < int(major):
        return (
            f"{has_gpu}, but {driver} supports CUDA up to {supported}, and torch {gpu.torch} is built for CUDA "
            f"{gpu.torch_cuda}; update the driver to one for CUDA {major}, install a torch build for CUDA {supported} "
            "or older (pytorch.org), or give device=cpu"
        )
    shown = "" if gpu.visible is None else f" with CUDA_VISIBLE_DEVICES={gpu.visible}"
    return f"{has_gpu}, but CUDA does not start{shown} ({gpu.failure}); check that nvidia-smi works, or give device=cpu"


def probe(environment: Mapping[str, str] = os.environ) -> Gpu:
    """Examine the GPUs of this machine."""
    import torch

    return Gpu(
        devices=_devices(),
        driver=driver_version(),
        driver_cuda=_driver_cuda(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        failure=_failure(),
        visible=environment.get("CUDA_VISIBLE_DEVICES"),
    )


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's kernel module, such as `535.104.05`; None if there is none."""
    try:
        match = re.search(r"Module.*?\s(\d+(?:\.\d+)+)\s", file.read_text())
    except OSError:
        return None
    return match[1] if match else None


def _devices() -> tuple[str, ...]:
    # a scheduler's job may see the files of devices that it may not open
    files = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*") if os.access(path, os.R_OK | os.W_OK))
    if files or not (Path("/dev/dxg").exists() and shutil.which("nvidia-smi")):
        return tuple(files)
    # WSL has no such files
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.partition(" (UUID")[0] for line in done.stdout.splitlines() if line.startswith("GPU "))


def _driver_cuda() -> tuple[int, int] | None:
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def _failure() -> str | None:
    import torch

    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except Exception as error:
        return str(error).strip().partition("\n")[0]
    return "torch finds no device"
