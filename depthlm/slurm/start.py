"""Whether the runs of a sweep would start in their jobs: the checks of training, with the resources of a job."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from depthlm.accounting.memory import MemoryEstimator, UntracedError
from depthlm.config import prepare_command
from depthlm.config.validate.machine import check_ranks
from depthlm.counts import gib_text
from depthlm.data import check_prepared
from depthlm.errors import UserError
from depthlm.run_directory import RunDirectory
from depthlm.runs.directory import check_run_directory
from depthlm.runs.records import COMPLETE, read_run
from depthlm.slurm.cluster import Cluster
from depthlm.sweeps import Point
from depthlm.training.memory_check import check_memory, what_fits

# run directories that a message names
MAX_NAMED = 3
RANKS_SET_BY = "slurm.nodes= and slurm.gpus_per_node= set the ranks; slurm.gpus_per_node=0 gives one, on a CPU"
# the memory of a common GPU, in bytes
COMMON_GPU = 80e9
# groups and settings that the memory of a run depends on
MEMORY_GROUPS = ("model", "size", "backbone", "training", "precision", "deepspeed")


def check_start(points: Iterable[Point], cluster: Cluster) -> None:
    """Raise UserError if a point would be refused when its job starts, with every reason and the points it holds for.

    These are the checks of training: whether the ranks can share the batch, whether the run fits in memory, if the
    memory of a rank is known, whether the data is prepared, unless training prepares it itself, whether the run may
    resume what is in its directory, and whether the run that it starts from is complete or submitted too.
    """
    points, reasons = list(points), dict[str, list[str]]()
    directories = {point.directory for point in points}
    memory_checked: dict[str, list[str]] = {}
    ranks, available = cluster.ranks(), cluster.memory_per_rank()
    device = torch.device("cuda" if cluster.gpus_per_node else "cpu")
    for point in points:
        config = point.config_elsewhere()
        mistakes = [f"{mistake}; {RANKS_SET_BY}" for mistake in check_ranks(config, ranks.world_size)]
        if not mistakes and available is not None:
            settings = asdict(config)
            key = json.dumps({name: settings[name] for name in MEMORY_GROUPS} | {"class": config.optimizer._target_})
            if key not in memory_checked:
                memory_checked[key] = _errors(check_memory, config, ranks, device, available)
            mistakes += memory_checked[key]
        mistakes += _errors(check_prepared, config.data, partial(prepare_command, config))
        mistakes += _errors(check_run_directory, config)
        # a run that has begun does not need it
        begun = RunDirectory(Path(point.directory)).checkpoint_folders() or not point.follows
        missing = [] if begun else [start for start in point.starts if start not in directories]
        mistakes += [
            f"starts from {start}, which is not complete; train it first, or submit both"
            for start in missing
            if read_run(start).state != COMPLETE
        ]
        for mistake in mistakes:
            reasons.setdefault(mistake, []).append(point.directory)
    if reasons:
        lines = [f"{_names(directories)}: {reason}" for reason, directories in reasons.items()]
        raise UserError("\n".join(["nothing is submitted, because training would refuse:", *lines]))


def memory_note(points: Iterable[Point], cluster: Cluster) -> str:
    """Return the memory of the largest point on each GPU, and settings with which it fits in 80 GB if it does not."""
    directory, config = max(
        ((point.directory, point.config_elsewhere()) for point in points),
        key=lambda one: one[1].size.hidden_size * one[1].model.loops * one[1].size.num_layers,
    )
    if config.training.pipeline.stages > 1:
        return "memory is not estimated for a pipeline"
    estimator, ranks = MemoryEstimator(config, "cuda"), cluster.ranks()
    if check_ranks(config, ranks.world_size):
        return f"memory is not estimated, since {ranks.world_size} ranks cannot train {directory}"
    share = config.training.batch_size // ranks.world_size
    size = config.training.micro_batch_size or share
    try:
        total = estimator.estimate(config.deepspeed.stage, ranks.world_size, size, share // size).total
        fitting = [] if total <= COMMON_GPU else [*what_fits(estimator, config, ranks, int(COMMON_GPU))]
    except UntracedError as error:
        return f"memory is not checked: {error}"
    remedies = f"; in {COMMON_GPU / 1e9:.0f} GB fit: {'; '.join(fitting)}" if fitting else ""
    return f"{directory} needs {gib_text(total)} of each GPU{remedies}"


def _errors(check: Callable[..., object], *arguments: object) -> list[str]:
    try:
        check(*arguments)
    except UserError as error:
        return [str(error)]
    return []


def _names(directories: list[str]) -> str:
    others = len(directories) - MAX_NAMED
    return ", ".join([*directories[:MAX_NAMED], *([f"and {others} more"] if others > 0 else [])])
