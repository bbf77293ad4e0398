"""The resources of SLURM jobs, from the keys `slurm.<key>=` and slurm/cluster.yaml, and the submitted jobs."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from depthlm.config.arguments import read_arguments
from depthlm.distributed.launchers import Ranks
from depthlm.errors import UserError
from depthlm.fields import key
from depthlm.files import read_bytes, read_text
from depthlm.runs.records import RUNNING, WAITING

# the user's settings, in the folder from which the sweep is submitted
SETTINGS = Path("slurm/cluster.yaml")
JOBS = "jobs.jsonl"
# the default of SLURM, for a cluster that does not report its own
MAX_ARRAY_SIZE = 1001
# states of jobs that have ended, which squeue lists for a moment, and of jobs that have not begun
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


@dataclass
class Cluster:
    """The resources and sbatch options of each point of a sweep."""

    partition: str | None = key(None, "partition; null here and below: the default of the cluster")
    account: str | None = key(None, "account")
    qos: str | None = key(None, "quality of service")
    time: str = key("24:00:00", "time limit of a job; a point that needs longer is saved, requeued and resumed")
    nodes: int = key(1, "nodes per point", minimum=1)
    gpus_per_node: int = key(8, "GPUs per node, each with one task and one rank; 0: no GPU", minimum=0)
    tasks_per_node: int | None = key(None, "ranks per node without GPUs; null: 1", minimum=1)
    cpus_per_task: int = key(8, "CPU cores per rank", minimum=1)
    mem: str | None = key(None, "memory per node, such as 500G")
    gpu_memory: float | None = key(
        None, "GB of memory of each GPU; a point that needs more is not submitted; null: not checked", above=0
    )
    throttle: int | None = key(None, "maximum number of concurrent points; null: the limit of the cluster", minimum=1)
    signal_seconds: int = key(120, "seconds before the time limit at which a job saves", minimum=1)
    setup: str = key("", "shell commands run in the job before training, such as `module load cuda/13.0`")
    extra: list[str] = key([], "additional options of sbatch, separated by commas: --exclude=n3,--constraint=h100")

    @property
    def tasks(self) -> int:
        """The ranks of a node."""
        return self.gpus_per_node or self.tasks_per_node or 1

    def ranks(self) -> Ranks:
        """Return rank 0 of a job."""
        return Ranks(0, 0, self.nodes * self.tasks, self.tasks, "srun", self.nodes)

    def memory_per_rank(self) -> int | None:
        """Return the bytes of a rank: those of a GPU, or its share of the memory of a node; None if not known."""
        if self.gpus_per_node:
            return None if self.gpu_memory is None else round(self.gpu_memory * 1e9)
        size = re.fullmatch(r"(\d+)([KMGT]?)B?", self.mem or "", re.IGNORECASE)
        if size is None or size[1] == "0":
            # a node's whole memory
            return None
        # without a unit, sbatch takes MiB
        return int(size[1]) * 2 ** (10 * (1 + "KMGT".index(size[2].upper() or "M"))) // self.tasks

    def options(self) -> list[str]:
        """Return the options of sbatch."""
        tasks = self.tasks
        values = {name: getattr(self, name) for name in ("partition", "account", "qos", "time", "mem", "nodes")}
        values |= {
            "ntasks-per-node": tasks,
            "cpus-per-task": self.cpus_per_task,
            "gpus-per-node": self.gpus_per_node or None,
            "signal": f"B:USR1@{self.signal_seconds}",
        }
        return [f"--{name}={value}" for name, value in values.items() if value is not None] + self.extra


def read_cluster(overrides: list[str]) -> Cluster:
    """Return the settings of slurm/cluster.yaml in the current folder, if it exists, with overrides on top.

    Raises UserError for an invalid file or override.
    """
    settings = _settings(SETTINGS)
    try:
        read_arguments(Cluster, settings)
    except UserError as error:
        raise UserError(f"{SETTINGS}: {error}") from None
    cluster = read_arguments(Cluster, [*settings, *overrides], prefix="slurm.")
    # an option may contain commas, as in --exclude=n1,n2
    cluster.extra = [option for option in re.split(r",(?=-)", ",".join(cluster.extra)) if option]
    return cluster


def record_array(folder: Path, job: str, directories: list[str], logs: Path) -> None:
    """Record in a folder that a job array trains these run directories, one per index. logs: the folder of its logs."""
    folder.mkdir(exist_ok=True)
    with (folder / JOBS).open("a") as file:
        file.write(json.dumps({"job": job, "directories": directories, "logs": str(logs)}) + "\n")


def job_logs(folders: Iterable[Path]) -> dict[str, Path]:
    """Return the log of the last job that was submitted for each run directory."""
    return dict(_tasks(folders).values())


def queued_points(folders: Iterable[Path]) -> dict[str, tuple[str, str]]:
    """Return the job of each run directory that has one: its state as that of a run, and why it waits, if it does.

    Raises UserError if SLURM does not answer.
    """
    tasks = _tasks(folders)
    if not tasks:
        return {}
    queue = _run("squeue", "--noheader", "--array", "--format=%F %K %T %r")
    if queue is None:
        raise UserError("squeue does not answer, so it is unknown which points have a job")
    jobs = {}
    for line in queue.splitlines():
        # squeue may print other lines too, such as warnings of plugins
        if (entry := re.fullmatch(r"(\d+) (\d+) ([A-Z_]+)(?: (.*))?", line.strip())) is None:
            continue
        job, index, state, reason = entry.groups()
        directory, _ = tasks.get((job, int(index)), (None, None))
        if directory is not None and state not in ENDED:
            known = "" if reason in (None, "None", "(null)") else f"waits: {reason}"
            jobs[directory] = (WAITING, known) if state in NOT_BEGUN else (RUNNING, "")
    return jobs


def max_array_size() -> int:
    """Return the maximum number of points in one job array."""
    shown = re.search(r"^\s*MaxArraySize\s*=\s*(\d+)\s*$", _run("scontrol", "show", "config") or "", re.MULTILINE)
    return max(1, int(shown[1] if shown else MAX_ARRAY_SIZE) - 1)


def _settings(file: Path) -> list[str]:
    if not file.is_file():
        return []
    try:
        # as text: YAML would read 12:00:00 as a number
        settings: Any = yaml.load(read_text(file), yaml.BaseLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{file}: not a YAML file ({' '.join(str(error).split())})") from None
    if settings is None or settings == "":
        return []
    if not isinstance(settings, dict):
        raise UserError(f"{file}: must have a line `key: value` for each setting")
    return [f"{name}={_text(name, value, file)}" for name, value in settings.items()]


def _text(name: str, value: Any, file: Path) -> str:
    parts = value if isinstance(value, list) else [value]
    if not all(isinstance(part, str) for part in parts):
        raise UserError(f"{file}: {name}: must be one value, or a list of values")
    text = ",".join(parts)
    return "null" if text in ("", "~") and name not in ("setup", "extra") else text


def _tasks(folders: Iterable[Path]) -> dict[tuple[str, int], tuple[str, Path]]:
    """Return the run directory and the log of each submitted task, by the job of its array and its index, in order."""
    tasks: dict[tuple[str, int], tuple[str, Path]] = {}
    for folder in sorted(set(folders)):
        for file in sorted(folder.glob(f"*/{JOBS}")):
            try:
                lines = read_bytes(file).splitlines()
            except OSError as error:
                print(f"{file}: cannot be read ({error}); its points count as not submitted", file=sys.stderr)
                continue
            for number, line in enumerate(lines, 1):
                try:
                    array = json.loads(line)
                    job, logs = str(array["job"]), Path(array.get("logs", file.parent))
                    for index, directory in enumerate(array["directories"]):
                        tasks[job, index] = str(directory), logs / f"log-{job}_{index}.txt"
                except (ValueError, KeyError, TypeError, RecursionError):
                    print(f"{file}:{number}: not a record of a job; its points count as not submitted", file=sys.stderr)
    return tasks


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
