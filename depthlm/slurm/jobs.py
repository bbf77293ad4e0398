"""Which points have a job, by SLURM's own queue."""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from depthlm.errors import UserError
from depthlm.runs.records import COMPLETE, RUNNING, WAITING, read_run

JOBS = "jobs.jsonl"
# of a cluster that does not tell
MAX_ARRAY_SIZE = 1001


def remember_jobs(snapshot: Path, job: str, directories: list[str]) -> None:
    """Note that a job array trains these run directories, one an index."""
    with (snapshot / JOBS).open("a") as file:
        file.write(json.dumps({"job": job, "directories": directories}) + "\n")


def submitted(folders: Iterable[Path]) -> set[str]:
    """The run directories that a job was submitted for, ever."""
    return {directory for directories in _arrays(folders).values() for directory in directories}


def queued_points(folders: Iterable[Path]) -> dict[str, str]:
    """The run directories that have a job, each with its state. Raises UserError where SLURM does not answer."""
    arrays = _arrays(folders)
    if not arrays:
        return {}
    queue = _run("squeue", "--noheader", "--array", "--format=%F %K %T")
    if queue is None:
        raise UserError("squeue does not answer, so that nobody can tell which points have a job")
    found = {}
    for line in queue.splitlines():
        job, index, state = line.split()
        if job in arrays and index.isdigit():
            # a job that ends is still there for a moment
            directory, over = arrays[job][int(index)], state not in ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING")
            if not over and read_run(directory).state != COMPLETE:
                found[directory] = WAITING if state == "PENDING" else RUNNING
    return found


def _arrays(folders: Iterable[Path]) -> dict[str, list[str]]:
    arrays = {}
    for folder in set(folders):
        for file in folder.glob(f"*/{JOBS}"):
            for line in file.read_text().splitlines():
                array = json.loads(line)
                arrays[array["job"]] = array["directories"]
    return arrays


def max_array_size() -> int:
    """How many points one array may have."""
    for line in (_run("scontrol", "show", "config") or "").splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "MaxArraySize" and value.strip().isdigit():
            return max(1, int(value) - 1)
    return MAX_ARRAY_SIZE - 1


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
