"""The points that have a job in the queue of SLURM."""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from depthlm.errors import UserError
from depthlm.runs.records import COMPLETE, RUNNING, WAITING, read_run

JOBS = "jobs.jsonl"
# the default of SLURM, for a cluster that does not report its own
MAX_ARRAY_SIZE = 1001


def remember_jobs(snapshot: Path, job: str, directories: list[str]) -> None:
    """Record that a job array trains these run directories, one per index."""
    with (snapshot / JOBS).open("a") as file:
        file.write(json.dumps({"job": job, "directories": directories}) + "\n")


def submitted(folders: Iterable[Path]) -> set[str]:
    """Return all run directories for which a job was ever submitted."""
    return {directory for directories in _arrays(folders).values() for directory in directories}


def queued_points(folders: Iterable[Path]) -> dict[str, str]:
    """Return the state of each run directory that has a job. Raises UserError if SLURM does not answer."""
    arrays = _arrays(folders)
    if not arrays:
        return {}
    queue = _run("squeue", "--noheader", "--array", "--format=%F %K %T")
    if queue is None:
        raise UserError("squeue does not answer, so it is unknown which points have a job")
    states = {}
    for line in queue.splitlines():
        job, index, state = line.split()
        if job in arrays and index.isdigit():
            # squeue still lists a job for a moment after its end
            directory, ended = arrays[job][int(index)], state not in ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING")
            if not ended and read_run(directory).state != COMPLETE:
                states[directory] = WAITING if state == "PENDING" else RUNNING
    return states


def _arrays(folders: Iterable[Path]) -> dict[str, list[str]]:
    arrays = {}
    for folder in set(folders):
        for file in folder.glob(f"*/{JOBS}"):
            for line in file.read_text().splitlines():
                array = json.loads(line)
                arrays[array["job"]] = array["directories"]
    return arrays


def max_array_size() -> int:
    """Return the maximum number of points in one job array."""
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
