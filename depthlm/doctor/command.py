"""The command `python -m depthlm doctor`: whether a run would start.

This module checks Python, packages and compilers; `doctor/run.py` checks the rest.
"""

import importlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement
from rich import box
from rich.markup import escape
from rich.table import Column, Table

from depthlm.console import stdout_console
from depthlm.locations import install_command
from depthlm.machine.environment import installed_version

OK, WARNING, PROBLEM = "ok", "warning", "problem"
COLORS = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}
MIN_PYTHON = (3, 11)
# for each extra, a package whose presence shows that the extra is installed
EXTRAS = {
    "evaluation": "lm-eval",
    "kimi": "fla-core",
    "optimizers": "pytorch-optimizer",
    "trackers": "trackio",
    "tune": "optuna",
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


def doctor(overrides: Sequence[str], config_dir: str | None, as_json: bool) -> int:
    """Check and print whether a run with these overrides would start here. Returns the exit code: 1 if not, else 0."""
    items = list(examine(overrides, config_dir))
    problems = [item for item in items if item.state == PROBLEM]
    if as_json:
        print(json.dumps({"starts": not problems, "items": [asdict(item) for item in items]}, indent=1))
    else:
        show(items)
    return 1 if problems else 0


def examine(overrides: Sequence[str], config_dir: str | None) -> Iterator[Item]:
    """Yield the items of all checks. If torch cannot be imported, only the installation is checked."""
    yield from run_check("Python", python)
    yield from run_check("packages", packages)
    imported = imports()
    yield imported
    if imported.state == PROBLEM:
        return
    # the items say what the checks of a run would log as warnings
    logging.getLogger("depthlm").setLevel(logging.ERROR)
    # this module imports torch
    from depthlm.doctor.run import checks

    for name, check in checks(overrides, config_dir).items():
        yield from run_check(name, check)


def run_check(name: str, check: Callable[[], Item | Iterable[Item]]) -> Iterator[Item]:
    """Yield the items of one check. An exception becomes an item with a problem and does not hide the other items."""
    try:
        result = check()
        yield from [result] if isinstance(result, Item) else result
    except Exception as error:
        yield Item(name, f"this check failed: {type(error).__name__}: {error}", PROBLEM, "report this as a bug")


def show(items: Sequence[Item]) -> None:
    """Print one row per item, with its remedy below, and the outcome."""
    console = stdout_console()
    if not console.is_terminal:
        console.width = 120
    columns = Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold")
    table = Table(*columns, box=box.SIMPLE, show_header=False, pad_edge=False)
    for item in items:
        color = COLORS[item.state]
        remedy = f"\n[{color}]->[/] {escape(item.remedy)}" if item.remedy else ""
        table.add_row(f"[{color}]{item.state}[/]", item.name, escape(item.value) + remedy)
    console.print(table)
    problems, warnings = (sum(item.state == state for item in items) for state in (PROBLEM, WARNING))
    warning_text = f"; warnings: {warnings}" if warnings else ""
    if problems:
        console.print(f"[bold red]A run would not start here: problems: {problems}{warning_text}.[/]")
    else:
        console.print(f"A run would start here{warning_text}.")


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
