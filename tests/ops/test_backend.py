"""The requirements that kernels=auto checks before Triton's first launch on a GPU, on simulated machines."""

import logging
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from depthlm.ops import backend


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with a GPU, gcc, Python's headers and the driver's library. The folder contains headers and library."""
    for name in ("Python.h", "libcuda.so.1"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda program: f"/bin/{program}" if program == "gcc" else None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    backend.missing.cache_clear()
    backend._say_once.cache_clear()
    yield tmp_path
    backend.missing.cache_clear()
    backend._say_once.cache_clear()


def test_missing_compiler_is_reported(complete, monkeypatch):
    assert backend.missing("cuda") is None
    # Triton does not look for cc
    monkeypatch.setattr("shutil.which", lambda program: "/bin/cc" if program == "cc" else None)
    assert "needs a C compiler for its launcher; install gcc" in (backend.launch_lacks() or "")
    monkeypatch.setenv("CC", "icc")
    assert "CC=icc is not a program" in (backend.launch_lacks() or "")


def test_missing_headers_and_driver_library_are_reported(complete, monkeypatch):
    (complete / "libcuda.so.1").unlink()
    assert "TRITON_LIBCUDA_PATH" in (backend.launch_lacks() or "")
    (complete / "libcuda.so.1").touch()
    (complete / "Python.h").unlink()
    lack = backend.launch_lacks() or ""
    assert str(complete) in lack
    assert "-dev), or use conda" in lack


def test_auto_falls_back_with_one_log_line_and_triton_raises(complete, monkeypatch):
    (complete / "Python.h").unlink()
    on_gpu: list[Any] = [SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.float32)]
    lines: list[str] = []
    logger = logging.getLogger("depthlm.ops.backend")
    monkeypatch.setattr(logger, "warning", lambda text, *arguments: lines.append(text % arguments))
    for operator in ("attention_residuals", "dca", "attention_residuals"):
        assert not backend.fused(operator, on_gpu)
    (line,) = lines
    assert line.startswith("kernels=auto: the operators over depth run in PyTorch: Triton needs Python's headers")
    with (
        backend.using("triton"),
        pytest.raises(ValueError, match="kernels=triton: attention_residuals: Triton needs Python's"),
    ):
        backend.fused("attention_residuals", on_gpu)
