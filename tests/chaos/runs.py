"""A run that is disturbed: its processes, as each launcher starts them, what it has written, and its results."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from depthlm.locations import REPOSITORY

from ..ranks import free_port, rank_variables

TRAIN = [sys.executable, "train.py"]
# torchrun waits 30 s for ranks that ignore SIGTERM
END_SECONDS = 120.0
# what must not depend on disturbances, of each row of metrics.jsonl
NAMES = (
    "step", "tokens", "loss", "mean_loss", "learning_rate", "grad_norm", "validation/stdlib/loss",
    "validation/local/loss",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A run that was started.

    processes: Popen objects of the ranks or of their launcher. text: returns what they printed. find: returns the
    process ids of the ranks if a launcher starts them.
    """

    processes: Sequence[Any]
    text: Callable[[], str]
    find: Callable[[], list[int]] | None = None

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks that run, in the order of ranks."""
        if self.find is not None:
            return self.find()
        return [process.pid for process in self.processes if process.poll() is None]

    def code(self) -> int | None:
        """Return None while the job runs, then its exit code: the first of a process that is not 0, or 0."""
        codes = [process.poll() for process in self.processes]
        return None if None in codes else next((code for code in codes if code), 0)

    def failed(self) -> bool:
        """Return whether any process has ended with an exit code that is not 0."""
        return any(process.poll() for process in self.processes)

    def wait(self) -> int:
        """Wait for the end of all processes and return the exit code. Raises RuntimeError if they do not end."""
        deadline = time.monotonic() + END_SECONDS
        while (code := self.code()) is None or self.ranks():
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {self.ranks()} did not end:\n{self.text()}")
            time.sleep(0.02)
        return code

    def kill(self) -> None:
        """Kill the launcher and all ranks."""
        for process in self.processes:
            process.kill()
        for pid in self.ranks():
            send(pid, signal.SIGKILL)


# starts a run with these overrides
Begin = Callable[[Sequence[str]], Job]


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def starter(launcher: str, ranks: int, output: Path) -> Begin:
    """Return what starts a run on this many ranks: launcher is python, torchrun or srun; output, a file."""

    def begin(overrides: Sequence[str]) -> Job:
        directory = next(text for text in overrides if text.startswith("output_dir="))
        port = free_port()
        output.write_text("")
        if launcher == "python":
            environments = [rank_variables(rank, port, ranks) for rank in range(ranks)] if ranks > 1 else [{}]
            started = [_popen([*TRAIN, *overrides], output, environment) for environment in environments]
            return Job(started, output.read_text)
        if launcher == "torchrun":
            command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}",
                       "--master-addr=127.0.0.1", f"--master-port={port}", "train.py"]  # fmt: skip
        else:
            command = ["srun", f"--ntasks={ranks}", *TRAIN]
        return Job([_popen([*command, *overrides], output)], output.read_text, lambda: _find(directory))

    return begin


def finish(overrides: Sequence[str], begin: Begin) -> None:
    """Train a run to its end. Raises RuntimeError with its output if it fails."""
    job = begin(overrides)
    try:
        while job.code() is None:
            time.sleep(0.05)
        if job.code():
            raise RuntimeError(job.text())
    finally:
        job.kill()


def newest_step(directory: Path) -> int:
    """Return the step of the newest complete row in metrics.jsonl, or 0 if there is none."""
    with suppress(OSError):
        for row in reversed((directory / "metrics.jsonl").read_text().splitlines()):
            with suppress(ValueError):
                return int(json.loads(row)["step"])
    return 0


def is_saving(directory: Path, since: float = 0.0) -> bool:
    """Return whether a checkpoint is being written. since: Unix time; folders that are older do not count."""
    for path in (directory / "checkpoints").glob(".saving-*"):
        with suppress(FileNotFoundError):
            if path.stat().st_ctime >= since:
                return True
    return False


def outcome(directory: Path) -> dict[str, Any]:
    """Return the results that must not depend on disturbances: loss curve, validation loss and weights."""
    rows = [json.loads(row) for row in (directory / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((directory / "summary.json").read_text())
    newest = (directory / "checkpoints/latest").read_text().strip()
    return {
        "curve": [[row.get(name) for name in NAMES] for row in rows],
        "validation_loss": summary["validation_loss"],
        "weights": load_file(directory / "checkpoints" / newest / "model.safetensors"),
    }


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two results are equal, bit for bit."""
    if any(first[key] != second[key] for key in ("curve", "validation_loss")):
        return False
    ours, theirs = first["weights"], second["weights"]
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _popen(command: Sequence[str], output: Path, variables: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    # all ranks append to it
    with output.open("a") as file:
        environment = {**os.environ, **(variables or {})}
        return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=file, stderr=subprocess.STDOUT)


def _find(directory: str) -> list[int]:
    """Return the process ids of the ranks that train with this override, in the order of ranks."""
    ranks_found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if {"train.py", directory} <= set(process.cmdline()):
                variables = process.environ()
                rank = variables.get("RANK") or variables.get("SLURM_PROCID")
                if rank is not None:
                    ranks_found.append((int(rank), process.pid))
    return [pid for _, pid in sorted(ranks_found)]
