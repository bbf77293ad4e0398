"""Unusable GPUs are explained, on simulated machines."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from depthlm.config import ConfigError, compose, compose_anywhere
from depthlm.errors import UserError
from depthlm.machine import environment
from depthlm.machine.environment import Gpu, driver_version, unusable

OLD = Gpu(
    devices=("/dev/nvidia0", "/dev/nvidia1"),
    driver="470.57.02",
    driver_cuda=(11, 4),
    torch="2.13.0",
    torch_cuda="13.0",
    failure="The NVIDIA driver on your system is too old (found version 11040).",
)


def test_a_driver_too_old_for_torch_is_reported_with_both_versions() -> None:
    reason = unusable(OLD) or ""
    assert "its driver 470.57.02 supports CUDA up to 11.4, and torch 2.13.0 is built for CUDA 13.0" in reason
    assert "update the driver to one for CUDA 13, install a torch build for CUDA 11.4 or older" in reason
    assert "give device=cpu" in reason


def test_an_older_driver_of_the_same_major_version_is_not_the_reason() -> None:
    newer = replace(
        OLD, driver="580.65.06", driver_cuda=(13, 0), torch_cuda="13.1", failure="system not yet initialized"
    )
    assert "CUDA does not start (system not yet initialized)" in (unusable(newer) or "")


def test_a_cpu_build_of_torch_is_reported() -> None:
    reason = unusable(replace(OLD, torch="2.13.0+cpu", torch_cuda=None)) or ""
    assert "torch 2.13.0+cpu is built for the CPU only; install a build for CUDA 11.4 or older" in reason


def test_a_missing_driver_library_is_reported() -> None:
    assert "libcuda.so.1, the library of its driver 470.57.02, was not found" in (
        unusable(replace(OLD, driver_cuda=None)) or ""
    )


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_a_gpu_hidden_by_the_user_is_no_error(visible: str) -> None:
    assert unusable(replace(OLD, visible=visible)) is None


def test_an_invalid_cuda_visible_devices_is_shown() -> None:
    typo = replace(OLD, driver_cuda=(13, 0), visible="7", failure="No CUDA GPUs are available")
    assert "with CUDA_VISIBLE_DEVICES=7 (No CUDA GPUs are available)" in (unusable(typo) or "")


def test_a_container_without_device_files_has_no_gpu() -> None:
    assert unusable(replace(OLD, devices=())) is None


def test_a_working_gpu_is_no_error() -> None:
    assert unusable(replace(OLD, driver_cuda=(13, 0), failure=None)) is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 UTC 2021\n", "470.57.02"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  555.42  Release Build  (root@x)\n", "555.42"),
        ("something else\n", None),
        (None, None),
    ],
)
def test_driver_version_is_parsed(tmp_path: Path, text: str | None, version: str | None) -> None:
    file = tmp_path / "version"
    if text is not None:
        file.write_text(text)
    assert driver_version(file) == version


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(environment, "probe", lambda: OLD)


def test_an_unusable_gpu_is_an_error_unless_the_cpu_is_requested(old_driver: None) -> None:
    for choice in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=f"device={choice}: this machine has an NVIDIA GPU"):
            compose([f"device={choice}"])
        with pytest.raises(UserError, match=f"device={choice}: this machine has an NVIDIA GPU"):
            environment.usable_device(choice)
    assert compose(["device=cpu"]).device == "cpu"
    assert environment.usable_device("cpu") == "cpu"
    # `compose_anywhere` skips checks of this machine
    assert compose_anywhere().device == "auto"


def test_cuda_without_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(environment, "probe", lambda: replace(OLD, devices=()))
    with pytest.raises(ConfigError, match="device=cuda: there is no NVIDIA GPU that this process may use"):
        compose(["device=cuda"])
    assert compose([]).device == "auto"


def test_device_cpu_is_used_despite_a_working_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {})
    assert environment.device_type("auto") == environment.device_type("cuda") == "cuda"
    assert environment.device_type("cpu") == "cpu"
    assert compose(["device=cpu"]).precision.name == "fp32"
    assert compose([]).precision.name == "bf16"
    monkeypatch.setattr("depthlm.ops.backend.missing", lambda device: None if device == "cuda" else "needs a GPU")
    with pytest.raises(ConfigError, match="kernels=triton"):
        compose(["device=cpu", "kernels=triton"])


@pytest.mark.parametrize(
    ("given", "launcher", "local_ranks", "variable", "text"),
    [
        (3, "python", 1, "5", "3 CPU threads per rank (training.num_threads)"),
        (None, "python", 1, "5", "5 CPU threads per rank (OMP_NUM_THREADS)"),
        (None, "python", 1, "1", "1 CPU thread per rank (OMP_NUM_THREADS)"),
        (None, "python", 1, "4,2", "4 CPU threads per rank (OMP_NUM_THREADS)"),
        (None, "python", 1, "many", "8 CPU threads per rank (all cores of this process)"),
        (None, "python", 1, None, "8 CPU threads per rank (all cores of this process)"),
        (None, "srun", 4, None, "8 CPU threads per rank (the cores that srun bound it to)"),
        (None, "deepspeed", 4, None, "2 CPU threads per rank (8 cores, 4 ranks on this node)"),
        # torchrun sets 1 itself
        (None, "torchrun", 4, "1", "2 CPU threads per rank (8 cores, 4 ranks on this node)"),
        (None, "torchrun", 4, "3", "3 CPU threads per rank (OMP_NUM_THREADS)"),
        (None, "torchrun", 1, "1", "1 CPU thread per rank (OMP_NUM_THREADS)"),
        (None, "torchrun", 16, None, "1 CPU thread per rank (8 cores, 16 ranks on this node)"),
    ],
)
def test_the_number_of_threads_has_a_reason(
    monkeypatch: pytest.MonkeyPatch,
    given: int | None,
    launcher: str,
    local_ranks: int,
    variable: str | None,
    text: str,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(environment, "cores", lambda: 8)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert str(environment.threads(given, launcher, local_ranks)) == text


def test_an_unknown_device_has_no_peak() -> None:
    assert environment.peak_flops("AMD EPYC", "bf16") is None
    assert environment.peak_flops("NVIDIA H200", "fp32") is None
    assert environment.peak_flops("NVIDIA H200", "bf16") == 989e12
    assert environment.peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16") is None
    assert environment.peak_flops("NVIDIA RTX A4000", "bf16") is None
    assert environment.peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert environment.peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == 312e12


@pytest.mark.parametrize(
    ("capabilities", "width", "expected"),
    [({"amx_bf16": True}, 128, "bf16"), ({"amx_bf16": True}, 64, "fp32"), ({"avx512": True}, 4096, "fp32")],
)
def test_a_cpu_takes_bf16_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], width: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert environment.fast_precision("cpu", width) == expected
