"""The device, CPU cores and software versions of this process, and why torch cannot use an NVIDIA GPU."""

import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

import depthlm
from depthlm.counts import format_count
from depthlm.errors import UserError
from depthlm.locations import IS_CHECKOUT, REPOSITORY

# the values of `device` in a configuration or a command
Device = Literal["auto", "cpu", "cuda"]
# values of CUDA_VISIBLE_DEVICES that hide every GPU
NO_DEVICE = ("", "-1", "NoDevFiles")
# dense bf16 (or fp16) TFLOP/s by torch's device name, from the vendors' data sheets, without sparsity
PEAK_TFLOPS = {
    "NVIDIA GB300": 2500,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA B200": 2250,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA GH200 120GB": 989,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA L40S": 362,
    "NVIDIA L40": 181,
    "NVIDIA A40": 150,
    "NVIDIA L4": 121,
    "NVIDIA A10": 125,
    "NVIDIA RTX 6000 Ada Generation": 364,
    "NVIDIA RTX A6000": 155,
    "NVIDIA GeForce RTX 5090": 209,
    "NVIDIA GeForce RTX 4090": 165,
    "NVIDIA GeForce RTX 4080": 97,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 3080": 59,
    "Tesla V100-SXM2-16GB": 125,
    "Tesla V100-SXM2-32GB": 125,
}
# the least hidden size of a model that a CPU with instructions for bf16 trains faster with it: at 64 it takes as long
# as fp32, at 48 2.3 times as long, and at 128 0.8 times (measured with AMX on one core)
MIN_BF16_WIDTH = 128


def device_type(choice: str = "auto") -> str:
    """Return `cuda` or `cpu`; `auto` is the GPU if torch can use one."""
    import torch

    return "cuda" if choice != "cpu" and torch.cuda.is_available() else "cpu"


def device_error(choice: str) -> str | None:
    """Return why the chosen device cannot be used, or why a GPU would stay idle; None if neither is the case."""
    if choice == "cpu" or device_type() == "cuda":
        return None
    if reason := unusable_gpu():
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


class Threads(NamedTuple):
    """The CPU threads of a rank, and what sets their number."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"{format_count(self.number, 'CPU thread')} per rank ({self.reason})"


def threads(given: int | None, launcher: str, ranks_of_node: int) -> Threads:
    """Return the CPU threads of a rank. given: training.num_threads.

    Without it, OMP_NUM_THREADS decides, then SLURM_CPUS_PER_TASK or the cores that srun bound the rank to, then its
    share of those of the node. torchrun sets OMP_NUM_THREADS to 1 for several ranks, which nobody asked for, so that
    value does not count.
    """
    if given is not None:
        return Threads(given, "training.num_threads")
    chosen = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if chosen.isdigit() and int(chosen) > 0 and not (launcher == "torchrun" and ranks_of_node > 1 and chosen == "1"):
        return Threads(int(chosen), "OMP_NUM_THREADS")
    if ranks_of_node == 1:
        return Threads(cores(), "all cores of this process")
    per_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if launcher == "srun" and per_task.isdigit():
        return Threads(max(1, min(int(per_task), cores())), "SLURM_CPUS_PER_TASK")
    if launcher == "srun" and cores() < (os.cpu_count() or 1):
        return Threads(cores(), "the cores that srun bound it to")
    return Threads(
        max(1, cores() // ranks_of_node), f"{format_count(cores(), 'core')}, {ranks_of_node} ranks on this node"
    )


def prevent_fragmentation() -> None:
    """Let the GPU's allocator grow its segments, unless the user has chosen settings; before CUDA starts.

    Otherwise fragmentation wastes several GiB, since the lists of sources have another length in every sublayer.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def fast_precision(device: str, width: int) -> str:
    """Return `bf16` if a model of a width is faster with it on the device (`cuda` or `cpu`), else `fp32`.

    Without hardware support, bf16 can be 45 times slower. On a CPU with it, narrow products cost less than their casts.
    """
    import torch

    if device == "cuda":
        # the question starts CUDA, which reads these settings once
        prevent_fragmentation()
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    capabilities = torch.cpu.get_capabilities()
    if width < MIN_BF16_WIDTH:
        return "fp32"
    return "bf16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "fp32"


def versions() -> dict[str, str | None]:
    """Return the versions of depthlm and of the packages that it needs; None for one that is not installed."""
    packages = ("torch", "deepspeed", "hydra-core", "omegaconf", "tokenizers", "triton", "wandb", "numpy")
    found: dict[str, str | None] = {"depthlm": depthlm.__version__}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


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


def unusable_gpu() -> str | None:
    """Return why torch does not use the machine's GPU, and the remedy; None if there is none, or if the user hid it."""
    import torch

    devices, visible = nvidia_devices(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if not devices or (visible is not None and visible.split(",")[0].strip() in NO_DEVICE):
        return None
    has_gpu, build = f"this machine has an NVIDIA GPU ({devices[0]})", f"torch {torch.__version__} is built for"
    if torch.version.cuda is None:
        return f"{has_gpu}, but {build} the CPU only; install a build with CUDA (pytorch.org), or give device=cpu"
    try:
        torch.cuda.init()
        failure = "torch finds no device"
    except Exception as error:
        failure = str(error).strip().partition("\n")[0]
    shown = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible}"
    return (
        f"{has_gpu}, but CUDA does not start{shown} ({failure}); {build} CUDA {torch.version.cuda}, and the driver is "
        f"{driver_version() or 'unknown'}: check that nvidia-smi works (in a container, use --gpus or --nv), update "
        "the driver, install a torch build for its CUDA (pytorch.org), or give device=cpu"
    )


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's kernel module, such as `535.104.05`; None if there is none."""
    try:
        match = re.search(r"Module.*?\s(\d+(?:\.\d+)+)\s", file.read_text())
    except OSError:
        return None
    return match[1] if match else None


def nvidia_devices() -> tuple[str, ...]:
    """Return the NVIDIA GPUs that this process may open."""
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


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a device; None rather than a guess if unknown, for a MIG slice, or in fp32."""
    tflops = PEAK_TFLOPS.get(device_name)
    return None if tflops is None or precision == "fp32" else tflops * 1e12
