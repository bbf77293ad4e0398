"""Where a decoder is cut into chunks of layers, on which stage each of them is, and which tensors cross each cut.

With P stages and V chunks per stage, chunk j of C = P V is on stage j mod P. Cut c lies before chunk c; cut 0 lies
between the embedding and the first layer. The tensors that cross a cut are those that a mechanism says later layers
need: `Connection.retained` and `SelfAttention.retained`. The same tensor has the same key at every cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import new_subgroups_by_enumeration
from torch.utils._pytree import tree_leaves, tree_map

from depthlm.config import Config
from depthlm.model import Decoder
from depthlm.model.decoder import Prefix
from depthlm.optimizers.build import parameter_groups

# the chunk that computed a tensor, -1 for the embedding and what opens the state, and its number among its tensors
Key = tuple[int, int]
Tensors = dict[Key, Tensor]
# the stages that have a parameter, ascending
Owners = tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a cut."""

    key: Key
    shape: torch.Size
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialized tensor for this place."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Chunk(NamedTuple):
    """The unrolled layers from `start` to `end`. The last chunk also has the final read, the head and the loss."""

    number: int
    start: int
    end: int
    is_last: bool

    def connections(self, model: Decoder) -> Sequence[nn.Module]:
        """Return the connections of the chunk."""
        return [*model.connections][2 * self.start : 2 * self.end + self.is_last]

    def modules(self, model: Decoder) -> list[nn.Module]:
        """Return the modules whose parameters the chunk uses."""
        layers = [model.layers[position % model.size.num_layers] for position in range(self.start, self.end)]
        head = [model.final_norm, model.head] if self.is_last else []
        has_embedding = self.number == 0 or (self.is_last and model.backbone.tie_embeddings)
        return [*layers, *self.connections(model), *head, *([model.embedding] if has_embedding else [])]


def chunks_of(model: Decoder, chunks: int) -> list[Chunk]:
    """Divide the unrolled layers into chunks, some of which have one layer more than others."""
    depth = model.loops * model.size.num_layers
    ends = [chunk * depth // chunks for chunk in range(chunks + 1)]
    return [Chunk(i, ends[i], ends[i + 1], i == chunks - 1) for i in range(chunks)]


def contents(model: Decoder, prefix: Prefix) -> tuple[Any, list[Tensor]]:
    """Return the state and the entries of the depth list at a cut, and the tensors in them that later layers need."""
    connection = model.connections[2 * prefix.position]
    state, entries = connection.settle(prefix.state), [tuple(entry) for entry in prefix.depth]
    return (state, entries), model.tensors_to_send(prefix._replace(state=state))


def describe_cut(model: Decoder, prefix: Prefix, known: Mapping[int, Key], chunk: int) -> Any:
    """Return the contents of the cut behind a chunk with a slot for each tensor that crosses it, else None.

    known: the keys of the tensors that the chunk got, by their id.
    """
    tree, needed = contents(model, prefix)
    keys = dict(known)
    for tensor in needed:
        keys.setdefault(id(tensor), (chunk, len(keys)))
    crossing = {id(tensor) for tensor in needed}

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return Slot(keys[id(leaf)], leaf.shape, leaf.dtype) if id(leaf) in crossing else None

    return tree_map(describe, tree)


def slots_of(cut: Any) -> list[Slot]:
    """Return the slots of a cut, each tensor once."""
    return list({leaf.key: leaf for leaf in tree_leaves(cut) if isinstance(leaf, Slot)}.values())


def tensors_at(model: Decoder, cut: Any, prefix: Prefix) -> Tensors:
    """Return the tensors that cross a cut."""
    pairs = zip(tree_leaves(cut), tree_leaves(contents(model, prefix)[0]), strict=True)
    return {slot.key: leaf for slot, leaf in pairs if isinstance(slot, Slot)}


def resume(model: Decoder, cut: Any, position: int, tensors: Mapping[Key, Tensor]) -> Prefix:
    """Return the prefix before a layer, from the tensors that crossed the cut there."""
    state, entries = tree_map(lambda leaf: tensors[leaf.key] if isinstance(leaf, Slot) else leaf, cut)
    number, attention = model.next_attention(position)
    if attention is not None:
        entries = attention.resume_depth(entries, number // model.size.num_layers)
    return Prefix(position, state, entries)


class Route(NamedTuple):
    """What crosses the cuts. cuts: their contents, by chunk. sent: the slots that are sent into each chunk."""

    cuts: list[Any]
    sent: list[list[Slot]]


def plan_route(cuts: list[Any], stages: int, caching: bool) -> Route:
    """Return the route: with caching, a stage keeps what it received for earlier chunks; else all is sent again.

    As in Attention Residuals (arXiv 2603.15031, section 4.1), a stage does not keep what it computed, except stage 0
    the embedding and what opens the state.
    """
    held: list[set[Key]] = [set() for _ in range(stages)]
    sent: list[list[Slot]] = []
    for chunk, cut in enumerate(cuts):
        slots, keys = slots_of(cut), held[chunk % stages]
        sent.append([slot for slot in slots if not (caching and slot.key in keys)] if chunk else [])
        keys.update(slot.key for slot in slots)
    return Route(cuts, sent)


def link(model: Decoder, chunk: Chunk) -> None:
    """Let the connections of a chunk read ahead for one another only."""
    connections: Any = chunk.connections(model)
    for connection in connections:
        connection.link([connection] if model.activation_checkpointing else connections)


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
