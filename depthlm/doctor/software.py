"""Python, packages and compilers, as `doctor` prints them."""

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from depthlm.doctor.item import PROBLEM, WARNING, Item
from depthlm.locations import install_command

LEAST_PYTHON = (3, 11)
# what comes with an extra, and the package that shows whether it is there
EXTRAS = {"evaluation": "lm-eval", "slurm": "submitit", "tune": "hydra-optuna-sweeper"}


def python() -> Item:
    """The interpreter."""
    value = f"{platform.python_version()} at {sys.executable}, {platform.platform()}"
    if sys.version_info < LEAST_PYTHON:
        return Item("Python", value, PROBLEM, f"install Python {'.'.join(map(str, LEAST_PYTHON))} or newer")
    return Item("Python", value)


def packages() -> Iterator[Item]:
    """What depthlm requires: its version here, and whether that is one of those that are allowed."""
    installed, wrong = [], []
    for requirement in requirements():
        version = installed_version(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name} is not installed")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, and {requirement} is needed")
        if version is not None:
            installed.append(f"{requirement.name} {version}")
    remedy = install_command()
    if not installed:
        yield Item("packages", "depthlm is not installed as a package, so what it needs is unknown", WARNING, remedy)
    else:
        state = (PROBLEM, remedy) if wrong else ()
        yield Item("packages", "; ".join([*wrong, ", ".join(installed)]), *state)
    versions = {extra: installed_version(name) for extra, name in EXTRAS.items()}
    there = [f"{extra} ({EXTRAS[extra]} {version})" for extra, version in versions.items() if version]
    missing = [f"{extra}: {install_command(extra)}" for extra, version in versions.items() if not version]
    yield Item("extras", "; ".join([*there, *(f"not {text}" for text in missing)]))


def requirements() -> list[Requirement]:
    """What depthlm needs without its extras; [] where it runs without being installed."""
    try:
        texts = importlib.metadata.requires("depthlm") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = [Requirement(text) for text in texts]
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]


def installed_version(package: str) -> str | None:
    """Of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def imports() -> Item:
    """Whether the packages that look at the machine can be imported on it: a version alone does not say that."""
    for package in ("torch", "deepspeed"):
        try:
            module = importlib.import_module(package)
            if package == "torch" and not module.cuda.is_available():
                # else DeepSpeed looks for a device itself, and prints what it finds
                os.environ["DS_ACCELERATOR"] = "cpu"
        except Exception as error:
            text = f"import {package}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            return Item("imports", text, PROBLEM, f"python -c 'import {package}' shows where it fails")
    return Item("imports", "torch and deepspeed can be imported")


def c_compiler(device: str) -> Iterator[Item]:
    """What Triton compiles its launcher with, at its first launch on a GPU: compiler, and Python's headers."""
    from depthlm.kernels.backend import launch_lacks, python_headers

    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(python_headers(), "Python.h")
    lack = launch_lacks() if device == "cuda" else None
    use = "" if device == "cuda" else " (only a GPU needs it)"
    state = (WARNING, lack) if lack else ()
    yield Item("C compiler", f"{compiler or 'none'}{use}", *(state if lack and "compile" in lack else ()))
    shown = str(headers) if headers.is_file() else f"no {headers}"
    yield Item("Python headers", f"{shown}{use}", *(state if lack and "headers" in lack else ()))


def cpp_compiler(device: str, compiles: bool) -> Item:
    """What torch.compile needs on a CPU. compiles: whether the run asks for it."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    use = "for training.compile=true on a CPU"
    if compiler or device == "cuda":
        return Item("C++ compiler", f"{compiler or 'none'} ({use})")
    state = PROBLEM if compiles else WARNING
    return Item("C++ compiler", f"none ({use})", state, "install g++ (Debian, Ubuntu: apt install g++)")
