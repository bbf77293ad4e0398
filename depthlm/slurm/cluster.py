"""The resources of a SLURM job, from the keys `slurm.<key>=` and slurm/cluster.yaml."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from depthlm.config.arguments import read_arguments
from depthlm.errors import UserError
from depthlm.fields import key

# the user's settings, in the folder from which the sweep is submitted
SETTINGS = Path("slurm/cluster.yaml")


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
    throttle: int | None = key(None, "maximum number of concurrent points; null: the limit of the cluster", minimum=1)
    signal_seconds: int = key(120, "seconds before the time limit at which a job saves", minimum=1)
    setup: str = key("", "shell commands run in the job before training, such as `module load cuda/13.0`")
    extra: list[str] = key([], "additional options of sbatch, separated by commas: --exclude=n3,--constraint=h100")

    def options(self) -> list[str]:
        """As options of sbatch."""
        tasks = self.tasks_per_node or max(1, self.gpus_per_node)
        values = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "time": self.time,
            "mem": self.mem,
            "nodes": self.nodes,
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


def _settings(file: Path) -> list[str]:
    if not file.is_file():
        return []
    try:
        # as text: YAML would read 12:00:00 as a number
        settings: Any = yaml.load(file.read_text(), yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
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
