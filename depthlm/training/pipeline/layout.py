"""Which stage has which parameters, and the process groups of a pipeline."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import new_subgroups_by_enumeration

from depthlm.config import Config
from depthlm.model import Decoder
from depthlm.optimizers.build import parameter_groups
from depthlm.training.pipeline.chunks import Chunk, chunks_of

# the stages that have a parameter, ascending
Owners = tuple[int, ...]


class Layout(NamedTuple):
    """The place of this rank among the stages. Ranks r P to (r + 1) P - 1 are the P stages of replica r.

    chunks: all of them. owners: of each parameter. groups: the names of the optimizer's groups, of all stages.
    group: the ranks of this pipeline. replicas: the ranks with the same stage; None if there is one pipeline.
    shared: the process group of each set of stages that share a parameter, if this stage is one of them.
    """

    stage: int
    stages: int
    replica: int
    chunks: list[Chunk]
    owners: dict[str, Owners]
    groups: list[list[str]]
    group: Any
    replicas: Any
    shared: dict[Owners, Any]


def find_layout(config: Config, model: Decoder) -> Layout:
    """Return the layout of the ranks, and create the process groups; collective."""
    pipeline, size = config.training.pipeline, torch.distributed.get_world_size()
    stages, starts = pipeline.stages, range(0, size, pipeline.stages)
    replica, stage = divmod(torch.distributed.get_rank(), stages)
    chunks = chunks_of(model, stages * pipeline.chunks)
    users: dict[nn.Parameter, set[int]] = {}
    for chunk in chunks:
        for parameter in nn.ModuleList(chunk.modules(model)).parameters():
            users.setdefault(parameter, set()).add(chunk.number % stages)
    owners = {name: tuple(sorted(users[parameter])) for name, parameter in model.named_parameters()}

    def subgroup(members: Owners) -> Any:
        return new_subgroups_by_enumeration([[start + member for member in members] for start in starts])[0]

    group, replicas = subgroup(tuple(range(stages))), None
    if len(starts) > 1:
        replicas, _ = new_subgroups_by_enumeration([[*range(member, size, stages)] for member in range(stages)])
    # every rank takes part in the creation of every group
    shared = {several: subgroup(several) for several in sorted(set(owners.values())) if len(several) > 1}
    shared = {several: ranks for several, ranks in shared.items() if stage in several}
    groups = [group["names"] for group in parameter_groups(model, config.optimizer)]
    return Layout(stage, stages, replica, chunks, owners, groups, group, replicas, shared)
