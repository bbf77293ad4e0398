"""Unusable GPUs are explained, on simulated machines."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch

from depthlm.config import ConfigError, compose
from depthlm.errors import UserError
from depthlm.machine import environment

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040)."


@pytest.fixture
def machine(monkeypatch) -> Callable[..., None]:
    """Simulate a machine whose GPU torch cannot use, unless it has no devices."""

    def simulate(devices=("/dev/nvidia0", "/dev/nvidia1"), cuda="13.0", failure=OLD_DRIVER, visible=None) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        monkeypatch.setattr("torch.cuda.init", Mock(side_effect=RuntimeError(failure)))
        monkeypatch.setattr("torch.version.cuda", cuda)
        monkeypatch.setattr(environment, "nvidia_devices", lambda: devices)
        monkeypatch.setattr(environment, "driver_version", lambda: "470.57.02")
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return simulate


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, f"CUDA does not start ({OLD_DRIVER})"),
        ({}, "is built for CUDA 13.0, and the driver is 470.57.02"),
        ({"cuda": None}, "is built for the CPU only; install a build with CUDA"),
        ({"visible": "7", "failure": "No CUDA GPUs are available"}, "with CUDA_VISIBLE_DEVICES=7 (No CUDA GPUs are"),
    ],
)
def test_the_reason_that_a_gpu_is_unusable_is_reported(machine, changes, reason):
    machine(**changes)
    assert reason in (environment.unusable_gpu() or "")
    assert "give device=cpu" in (environment.unusable_gpu() or "")


def test_no_gpu_and_a_hidden_one_are_no_error(machine):
    for changes in (*({"visible": visible} for visible in ("", "-1", "NoDevFiles")), {"devices": ()}):
        machine(**changes)
        assert environment.unusable_gpu() is None


def test_an_unusable_gpu_is_an_error_unless_the_cpu_is_requested(machine):
    machine()
    for choice in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=f"device={choice}: this machine has an NVIDIA GPU"):
            compose([f"device={choice}"])
        with pytest.raises(UserError, match=f"device={choice}: this machine has an NVIDIA GPU"):
            environment.usable_device(choice)
    assert compose(["device=cpu"]).device == "cpu"
    assert environment.usable_device("cpu") == "cpu"
    # with here=False, nothing of this machine is checked
    assert compose(here=False).device == "auto"
    machine(devices=())
    with pytest.raises(ConfigError, match="device=cuda: there is no NVIDIA GPU that this process may use"):
        compose(["device=cuda"])
    assert compose([]).device == "auto"


@pytest.mark.parametrize(
    ("given", "launcher", "local_ranks", "variable", "text"),
    [
        (3, "python", 1, "5", "3 CPU threads per rank (training.num_threads)"),
        (None, "python", 1, "5", "5 CPU threads per rank (OMP_NUM_THREADS)"),
        (None, "python", 1, "many", "8 CPU threads per rank (all cores of this process)"),
        (None, "srun", 4, None, "8 CPU threads per rank (the cores that srun bound it to)"),
        (None, "deepspeed", 4, None, "2 CPU threads per rank (8 cores, 4 ranks on this node)"),
        # torchrun sets 1 itself
        (None, "torchrun", 16, "1", "1 CPU thread per rank (8 cores, 16 ranks on this node)"),
    ],
)
def test_the_number_of_threads_has_a_reason(monkeypatch, given, launcher, local_ranks, variable, text):
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment, "cores", lambda: 8)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert str(environment.threads(given, launcher, local_ranks)) == text
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    if launcher == "srun":
        assert environment.threads(given, launcher, local_ranks).number == 6


def test_an_unknown_device_has_no_peak():
    for name, precision, peak in (
        ("NVIDIA H200", "fp32", None),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
    ):
        assert environment.peak_flops(name, precision) == peak


def test_a_cpu_takes_bf16_where_it_is_faster(monkeypatch):
    for capability, width, expected in (("amx_bf16", 128, "bf16"), ("amx_bf16", 64, "fp32"), ("avx512", 4096, "fp32")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda capability=capability: {capability: True})
        assert environment.fast_precision("cpu", width) == expected
