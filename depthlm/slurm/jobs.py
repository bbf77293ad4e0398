"""The points that have a job in the queue of SLURM."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from depthlm.errors import UserError
from depthlm.runs.records import COMPLETE, RUNNING, WAITING, read_run

JOBS = "jobs.jsonl"
# the default of SLURM, for a cluster that does not report its own
MAX_ARRAY_SIZE = 1001
# states of jobs that squeue may list for a moment after their end, and of jobs that have not begun
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
NOT_BEGUN = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}


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
        # clusters print other lines too, such as warnings of plugins
        if (entry := re.fullmatch(r"(\d+) (\d+) ([A-Z_]+)", line.strip())) is None:
            continue
        job, index, state = entry.groups()
        directory = dict(enumerate(arrays.get(job, []))).get(int(index))
        if directory is not None and state not in ENDED and read_run(directory).state != COMPLETE:
            states[directory] = WAITING if state in NOT_BEGUN else RUNNING
    return states


def _arrays(folders: Iterable[Path]) -> dict[str, list[str]]:
    arrays = {}
    for folder in set(folders):
        for file in folder.glob(f"*/{JOBS}"):
            for number, line in enumerate(file.read_bytes().splitlines(), 1):
                try:
                    array = json.loads(line)
                    arrays[str(array["job"])] = [str(directory) for directory in array["directories"]]
                except (ValueError, KeyError, TypeError):
                    print(f"{file}:{number}: not a record of a job; its points count as not submitted", file=sys.stderr)
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
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
