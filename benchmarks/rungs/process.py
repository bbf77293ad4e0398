"""A rung of benchmarks/gpu.py as a process: what it is, its start, its limit and its record."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from depthlm.files import read_json, replace_text
from depthlm.locations import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
SIDE_BY_SIDE, IN_TURN = PARTS = (1, 2)
# seconds that a process has to end after SIGTERM, before it is killed
GRACE = 5.0
# lines of a rung's output that its JSON keeps if it failed
TAIL = 30


@dataclass(frozen=True)
class Rung:
    """A measurement, as rungs/rungs.yaml describes it."""

    name: str
    question: str
    part: int
    minutes: float
    script: str
    arguments: str
    rehearsal: str
    packages: Sequence[str] = ()

    def lacks(self) -> str | None:
        """Return why the rung cannot run, or None."""
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f"not installed: {', '.join(missing)}" if missing else None


RUNGS = tuple(Rung(**rung) for rung in yaml.safe_load((BENCHMARKS / "rungs" / "rungs.yaml").read_text()))


@dataclass(frozen=True)
class Running:
    """A rung that runs. arguments: of its script. limit: its seconds. scratch: a folder for its large files."""

    rung: Rung
    folder: Path
    arguments: list[str]
    process: subprocess.Popen[bytes]
    scratch: Path
    limit: float
    started: float

    def status(self) -> str | None:
        """Return how the rung has ended, or None while it may continue."""
        code = self.process.poll()
        if code is not None:
            return "passed" if code == 0 else f"failed with exit status {code}"
        late = time.monotonic() - self.started >= self.limit
        return f"stopped after its limit of {self.limit:.0f} s" if late else None


def environment(rehearse: bool, part: int = IN_TURN) -> dict[str, str]:
    """Return the environment variables of a rung."""
    settings = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "TOKENIZERS_PARALLELISM": "false"}
    given = [path] if (path := os.environ.get("PYTHONPATH")) else []
    settings["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *given])
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & settings.keys():
        # as in train.py: without it, fragmentation wastes several GiB
        settings["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    # the profiler and graphs in one process: PyTorch sets these for the graphs of its compiler only
    settings |= {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
    if part == SIDE_BY_SIDE:
        # there are as many processes as cores, and each of them compiles
        settings |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    # Triton's interpreter would take the place of the GPU
    settings.pop("TRITON_INTERPRET", None)
    if rehearse:
        settings |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return settings


def start(rung: Rung, folder: Path, rehearse: bool, seconds: float) -> Running:
    """Start a rung that may run for so many seconds."""
    result, log = folder / f"{rung.name}.json", folder / f"{rung.name}.log"
    result.unlink(missing_ok=True)
    (REPOSITORY / "outputs").mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="gpu-", dir=REPOSITORY / "outputs"))
    arguments = (rung.rehearsal if rehearse else rung.arguments).split()
    words = [word.format(scratch=scratch) for word in arguments]
    command = [sys.executable, str(BENCHMARKS / rung.script), *words, "--output", str(result)]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment(rehearse, rung.part),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Running(rung, folder, arguments, process, scratch, seconds, time.monotonic())


def finish(running: Running, status: str) -> None:
    """End a rung's processes, and write its record beside its results: status, seconds, command, error."""
    seconds = round(time.monotonic() - running.started, 1)
    end(running.process)
    shutil.rmtree(running.scratch, ignore_errors=True)
    # without the paths of this machine
    command, name = [running.rung.script, *running.arguments], running.rung.name
    record: dict[str, Any] = {"status": status, "seconds": seconds, "command": command}
    log = running.folder / f"{name}.log"
    lines = log.read_text(errors="replace").splitlines()
    if status != "passed":
        record["error"] = "\n".join(lines[-TAIL:])
    write_record(running.folder, name, record)
    print(f"    {name}: {status} in {seconds:.0f} s", flush=True)
    if status not in ("passed", "interrupted"):
        print(f"    {lines[-1] if lines else 'it printed nothing'}\n    its output: {log}")


def write_record(folder: Path, name: str, record: dict[str, Any]) -> None:
    """Write a rung's record beside the results that it has written itself."""
    file = folder / f"{name}.json"
    replace_text(file, json.dumps({"rung": record, **read_json(file)}, indent=1) + "\n")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, which would keep memory of the GPU."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE)
