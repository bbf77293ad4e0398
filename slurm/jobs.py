"""Which points have a job, by SLURM's own queue."""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

JOBS = "jobs.jsonl"
# of a cluster that does not tell
MAX_ARRAY_SIZE = 1001


def remember_jobs(snapshot: Path, job: str, directories: list[str]) -> None:
    """Note that a job array trains these run directories, one an index."""
    with (snapshot / JOBS).open("a") as file:
        file.write(json.dumps({"job": job, "directories": directories}) + "\n")


def queued_points(folders: Iterable[Path]) -> dict[str, str]:
    """The run directories that have a job, and its state in SLURM's words, in small letters."""
    arrays = {}
    for folder in set(folders):
        for file in folder.glob(f"*/{JOBS}"):
            for line in file.read_text().splitlines():
                array = json.loads(line)
                arrays[array["job"]] = array["directories"]
    if not arrays:
        return {}
    queue = _run("squeue", "--noheader", "--array", "--format=%F %K %T", f"--jobs={','.join(arrays)}")
    if queue is None:
        # squeue refuses jobs that it has forgotten
        queue = _run("squeue", "--noheader", "--array", "--format=%F %K %T") or ""
    found = {}
    for line in queue.splitlines():
        job, index, state = line.split()
        if job in arrays and index.isdigit() and state not in ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT"):
            found[arrays[job][int(index)]] = {"PENDING": "waiting", "COMPLETING": "running"}.get(state, state.lower())
    return found


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
