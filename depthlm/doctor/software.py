"""The checks of `doctor` on Python, packages and compilers."""

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from depthlm.locations import install_command
from depthlm.machine.environment import installed_version

OK, WARNING, PROBLEM = "ok", "warning", "problem"
MIN_PYTHON = (3, 11)
# for each extra, a package whose presence shows that the extra is installed
EXTRAS = {
    "evaluation": "lm-eval",
    "kimi": "fla-core",
    "optimizers": "pytorch-optimizer",
    "trackers": "trackio",
    "tune": "hydra-optuna-sweeper",
}


@dataclass(frozen=True)
class Item:
    """The result of one check.

    state: a run starts despite a warning, but not with a problem. remedy: what to do about a warning or a problem.
    """

    name: str
    value: str
    state: str = OK
    remedy: str = ""


def python() -> Item:
    """Check the version of Python."""
    value = f"{platform.python_version()} at {sys.executable}, {platform.platform()}"
    if sys.version_info < MIN_PYTHON:
        return Item("Python", value, PROBLEM, f"install Python {'.'.join(map(str, MIN_PYTHON))} or newer")
    return Item("Python", value)


def packages() -> Iterator[Item]:
    """Check that every required package is installed in an allowed version, and report the extras."""
    installed, wrong = [], []
    for requirement in requirements():
        version = installed_version(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name} is not installed")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, but {requirement} is required")
        if version is not None:
            installed.append(f"{requirement.name} {version}")
    remedy = install_command()
    if not installed:
        yield Item("packages", "depthlm is not installed, so its requirements cannot be checked", WARNING, remedy)
    else:
        state = (PROBLEM, remedy) if wrong else ()
        yield Item("packages", "; ".join([*wrong, ", ".join(installed)]), *state)
    versions = {extra: installed_version(name) for extra, name in EXTRAS.items()}
    available = [f"{extra} ({EXTRAS[extra]} {version})" for extra, version in versions.items() if version]
    missing = [f"{extra}: {install_command(extra)}" for extra, version in versions.items() if not version]
    yield Item("extras", "; ".join([*available, *(f"not {text}" for text in missing)]))


def requirements() -> list[Requirement]:
    """Return the requirements of depthlm without its extras; [] if it is not installed."""
    try:
        texts = importlib.metadata.requires("depthlm") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    parsed = [Requirement(text) for text in texts]
    return [
        requirement
        for requirement in parsed
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]


def imports() -> Item:
    """Check that torch and deepspeed can be imported, which an installed version does not guarantee."""
    for package in ("torch", "deepspeed"):
        try:
            module = importlib.import_module(package)
            if package == "torch" and not module.cuda.is_available():
                # otherwise DeepSpeed searches for a device and prints what it finds
                os.environ["DS_ACCELERATOR"] = "cpu"
        except Exception as error:
            text = f"import {package}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            return Item("imports", text, PROBLEM, f"python -c 'import {package}' shows where it fails")
    return Item("imports", "torch and deepspeed can be imported")


def c_compiler(device: str) -> Iterator[Item]:
    """Check the C compiler and Python's headers, which Triton needs for its first launch on a GPU."""
    from depthlm.ops.backend import launch_lacks, python_headers

    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(python_headers(), "Python.h")
    reason = launch_lacks() if device == "cuda" else None
    use = "" if device == "cuda" else " (only needed with a GPU)"
    state = (WARNING, reason) if reason else ()
    yield Item("C compiler", f"{compiler or 'none'}{use}", *(state if reason and "compile" in reason else ()))
    shown = str(headers) if headers.is_file() else f"no {headers}"
    yield Item("Python headers", f"{shown}{use}", *(state if reason and "headers" in reason else ()))


def cpp_compiler(device: str, compiles: bool) -> Item:
    """Check the C++ compiler, which torch.compile needs on a CPU. compiles: whether the run uses torch.compile."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    use = "for training.compile=true on a CPU"
    if compiler or device == "cuda":
        return Item("C++ compiler", f"{compiler or 'none'} ({use})")
    state = PROBLEM if compiles else WARNING
    return Item("C++ compiler", f"none ({use})", state, "install g++ (Debian, Ubuntu: apt install g++)")
