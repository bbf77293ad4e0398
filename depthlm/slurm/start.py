"""Whether the runs of a sweep would start in their jobs: the checks of training, with the resources of a job."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial

import torch

from depthlm.config import Config, compose_anywhere, prepare_command
from depthlm.config.validate.checks import check_ranks
from depthlm.data import check_prepared
from depthlm.errors import UserError
from depthlm.slurm.cluster import Cluster
from depthlm.sweeps import Point
from depthlm.training.memory_check import check_memory

# run directories that a message names
MAX_NAMED = 3
# groups and settings that the memory of a run depends on
MEMORY_GROUPS = ("model", "size", "backbone", "training", "precision", "deepspeed")


def check_start(points: Iterable[Point], cluster: Cluster) -> None:
    """Raise UserError if a point would be refused when its job starts, with every reason and the points it holds for.

    These are the checks of training: whether the ranks can share the batch, whether the run fits in memory, if the
    memory of a rank is known, and whether the data is prepared, unless training prepares it itself.
    """
    reasons: dict[str, list[str]] = {}
    memory_checked: dict[str, str | None] = {}
    for point in points:
        config = compose_anywhere(point.checkable(), point.config_dir)
        ranks = cluster.ranks()
        mistakes = check_ranks(config, ranks.world_size)
        if not mistakes:
            settings = asdict(config)
            key = json.dumps({name: settings[name] for name in MEMORY_GROUPS} | {"class": config.optimizer._target_})
            if key not in memory_checked:
                memory_checked[key] = _memory_error(config, cluster)
            mistakes = [*filter(None, [memory_checked[key]])]
        for mistake in (*mistakes, *_data_errors(config)):
            reasons.setdefault(mistake, []).append(point.directory)
    if reasons:
        lines = [f"{_names(directories)}: {reason}" for reason, directories in reasons.items()]
        raise UserError("\n".join(["nothing is submitted, because training would refuse:", *lines]))


def _memory_error(config: Config, cluster: Cluster) -> str | None:
    available = cluster.memory_per_rank()
    if available is None:
        return None
    device = torch.device("cuda" if cluster.gpus_per_node else "cpu")
    try:
        check_memory(config, cluster.ranks(), device, available)
    except UserError as error:
        return str(error)
    return None


def _data_errors(config: Config) -> Iterator[str]:
    try:
        check_prepared(config.data, partial(prepare_command, config))
    except UserError as error:
        yield str(error)


def _names(directories: list[str]) -> str:
    others = len(directories) - MAX_NAMED
    return ", ".join([*directories[:MAX_NAMED], *([f"and {others} more"] if others > 0 else [])])
