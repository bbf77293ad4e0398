"""The command `python -m depthlm doctor`: whether a run would start on this machine.

It makes a dry run, and adds what that does not show: versions, extras, devices, W&B and the disk.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
import traceback
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement
from rich import box
from rich.markup import escape
from rich.table import Column, Table

from depthlm.config import Config, compose
from depthlm.console import stdout_console
from depthlm.counts import format_count, gib_text
from depthlm.errors import UserError
from depthlm.locations import install_command
from depthlm.machine.environment import device_name, installed_version, probe
from depthlm.runs.weights_and_biases import has_key

OK, WARNING, PROBLEM = "ok", "warning", "problem"
COLORS = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}
# for each extra, a package whose presence shows that the extra is installed
EXTRAS = {
    "evaluation": "lm-eval",
    "kimi": "fla-core",
    "optimizers": "pytorch-optimizer",
    "trackers": "trackio",
    "tune": "optuna",
}
# seconds to wait for a connection to W&B's server
CONNECTION_TIMEOUT = 3.0
# bytes below which a run may not be able to save its checkpoints
LOW_DISK = 5 * 2**30


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
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        items = list(examine(overrides, config_dir))
    starts = all(item.state != PROBLEM for item in items)
    if as_json:
        print(json.dumps({"starts": starts, "items": [asdict(item) for item in items]}, indent=1))
    else:
        show(items)
    return 0 if starts else 1


def examine(overrides: Sequence[str], config_dir: str | None) -> Iterator[Item]:
    """Yield the results of all checks. A problem with which no run composes ends them."""
    yield Item("Python", f"{platform.python_version()} at {sys.executable}, {platform.platform()}")
    yield packages()
    yield extras()
    try:
        import torch  # noqa: F401
    except Exception as error:
        text = f"import torch: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        yield Item("device", text, PROBLEM, "python -c 'import torch' shows where it fails")
        return
    yield attempt("device", devices)
    try:
        config = compose([*overrides, "dry_run=true"], config_dir)
    except UserError as error:
        yield Item("run", str(error), PROBLEM, "python train.py --help lists every key")
        return
    yield attempt("disk", lambda: disk(Path(config.output_dir or "outputs")))
    yield attempt("W&B", lambda: wandb(config))
    yield run(config)


def attempt(name: str, check: Callable[[], Item]) -> Item:
    """Return the result of a check, or why it failed, such as a GPU that does not answer."""
    try:
        return check()
    except Exception as error:
        return Item(name, f"the check failed: {type(error).__name__}: {error}", WARNING)


def run(config: Config) -> Item:
    """Make the dry run of a configuration."""
    from depthlm.training import train

    try:
        train(config)
    except UserError as error:
        return Item("run", str(error), PROBLEM)
    except Exception as error:
        traceback.print_exc()
        return Item("run", f"{type(error).__name__}: {error}", PROBLEM, "the traceback shows where it fails")
    return Item("run", f"the dry run had no errors; a run writes to {config.output_dir}")


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
    noted = f", {format_count(warnings, 'warning')}" if warnings else ""
    if problems:
        console.print(f"[bold red]A run would not start here: {format_count(problems, 'problem')}{noted}.[/]")
    else:
        console.print(f"A run would start here{noted}.")


def packages() -> Item:
    """Check that every required package is installed in an allowed version."""
    installed, wrong = [], []
    for requirement in requirements():
        version = installed_version(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name} is not installed")
            continue
        installed.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, but {requirement} is required")
    if not installed:
        value = "depthlm is not installed, so its requirements cannot be checked"
        return Item("packages", value, WARNING, install_command())
    state = (PROBLEM, install_command()) if wrong else ()
    return Item("packages", "; ".join([*wrong, ", ".join(installed)]), *state)


def requirements() -> list[Requirement]:
    """Return the requirements of depthlm without its extras; [] if it is not installed."""
    try:
        texts = importlib.metadata.requires("depthlm") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    parsed = map(Requirement, texts)
    return [wanted for wanted in parsed if wanted.marker is None or wanted.marker.evaluate({"extra": ""})]


def extras() -> Item:
    """Report which extras are installed, and how to install the others."""
    versions = {extra: installed_version(name) for extra, name in EXTRAS.items()}
    available = [f"{extra} ({EXTRAS[extra]} {version})" for extra, version in versions.items() if version]
    missing = [f"not {extra}: {install_command(extra)}" for extra, version in versions.items() if not version]
    return Item("extras", "; ".join([*available, *missing]))


def devices() -> Item:
    """Report the GPUs, NVIDIA's driver and NCCL, or the processor, and what torch is built for."""
    import torch

    gpu = probe()
    built = f"torch {gpu.torch} is built for {f'CUDA {gpu.torch_cuda}' if gpu.torch_cuda else 'the CPU'}"
    cuda = "" if gpu.driver_cuda is None else f", which supports CUDA up to {'.'.join(map(str, gpu.driver_cuda))}"
    driver = f"NVIDIA driver {gpu.driver or 'unknown'}{cuda}" if gpu.driver or cuda else "no NVIDIA driver"
    if not torch.cuda.is_available():
        return Item("device", f"{device_name('cpu')}; {driver}; {built}")
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = [
        f"{card.name}, {gib_text(card.total_memory, 1)}, compute capability {card.major}.{card.minor}" for card in cards
    ]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "not included"
    listed = "; ".join(f"cuda:{index}: {name}" for index, name in enumerate(names))
    return Item("device", f"{listed}; {driver}; {built}; NCCL {nccl}")


def disk(folder: Path) -> Item:
    """Check the free space for checkpoints."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    remedy = "a checkpoint takes 12 bytes per parameter, and two are kept; free some space, or give another output_dir="
    return Item("disk", f"{gib_text(free, 1)} free in {existing}", *((WARNING, remedy) if free < LOW_DISK else ()))


def wandb(config: Config) -> Item:
    """Check whether W&B receives metrics during training."""
    if not config.tracker.wandb or os.environ.get("WANDB_MODE") == "disabled":
        return Item("W&B", "not used; metrics.jsonl is always written")
    is_offline = config.tracker.mode == "offline" or os.environ.get("WANDB_MODE") in ("offline", "dryrun")
    if is_offline or not has_key():
        why = "as configured" if is_offline else "no key is set; `wandb login` sets one, tracker=none turns W&B off"
        return Item("W&B", f"offline ({why}); `wandb sync` uploads a run")
    url = urllib.parse.urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    host = url.netloc
    try:
        address = url.hostname or "", url.port or (80 if url.scheme == "http" else 443)
        socket.create_connection(address, timeout=CONNECTION_TIMEOUT).close()
    except OSError as error:
        remedy = "a run starts, and switches to offline after up to 60 s; tracker.mode=offline avoids the wait"
        value = f"a key is set, but {host} does not answer within {CONNECTION_TIMEOUT:.0f} s ({error})"
        return Item("W&B", value, WARNING, remedy)
    return Item("W&B", f"online: a key is set, and {host} answers")
