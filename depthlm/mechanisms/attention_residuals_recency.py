"""Attention Residuals as a baseline of Depth-Attention (arXiv 2606.05014), with a bias towards the running sum.

    h = sum_j alpha_j b_j,  alpha = softmax_j(w . RMSNorm(b_j) + r [b_j is the running sum])

with a parameter r that is initially 3. The running sum starts as the embedding, adds every sublayer output and is never
reset. The other sources are the embedding and snapshots of the running sum at the end of some layers.

Our addition: with start=identity, a read is (1 - g) x + g h, with the running sum x and a parameter g of each read that
is initially 0, so that the decoder initially equals vanilla.

    [embedding, snapshots, running sum] --attention over depth--> h -> sublayer -(+)-> running sum -> perhaps a snapshot
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from depthlm.mechanisms.attention_residuals import (
    STARTS,
    add_sources,
    begin,
    default_block_size,
    figure,
    gate_figure,
    gated_cost,
    read_cost,
    two_phase_values,
)
from depthlm.model.connection import Connection, Inputs
from depthlm.model.figures import Figure
from depthlm.model.read_ahead import Partial, ReadAhead
from depthlm.model.settings import at_least, check, one_of
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.depth_reduce import interpolate, source_scores, weighted_sum


class State(NamedTuple):
    """snapshots: the embedding first. ahead: as in `attention_residuals.State`."""

    snapshots: tuple[Tensor, ...]
    running_sum: Tensor
    ahead: tuple[Partial, ...] = ()

    @property
    def sources(self) -> tuple[Tensor, ...]:
        return (*self.snapshots, self.running_sum)


class AttentionResidualsRecency(Connection):
    """Every sublayer reads an attention over the embedding, snapshots of the running sum, and the running sum.

    block_size: sublayers between snapshots, which layers end, so an odd number is rounded up; None: ceil(2L / 8).
    start: paper; identity: (1 - g) x + g h, so that the decoder initially equals vanilla.
    """

    colour = "#F4A582"
    accumulates = "sum"
    identity_start = "start=identity"
    width_exponents: ClassVar = {"query": 1.0}
    # of the scores
    factor = 1.0

    def __init__(
        self,
        spec: SublayerSpec,
        size: Size,
        backbone: Backbone,
        block_size: int | None = None,
        start: str = "paper",
    ):
        super().__init__(spec, size, backbone)
        check(at_least(1, block_size=block_size, optional=True), one_of(STARTS, start=start))
        self.block_size = block_size or default_block_size(spec)
        self.eps = backbone.norm_eps
        snapshots = self.snapshots(spec.layer)
        self.takes_snapshot = spec.kind == "mlp" and self.snapshots(spec.layer + 1) > snapshots
        self.num_sources = 2 + snapshots
        self.cost = read_cost(size, self.num_sources)
        self.cost = self.cost._replace(two_phase_values=two_phase_values(spec, size, 2 * -(-self.block_size // 2)))
        # the running sum still changes, so it cannot be read ahead
        self.read_ahead = ReadAhead(self, begin, self.extend, num_fixed=self.num_sources - 1)
        self.query = nn.Parameter(torch.empty(size.hidden_size))
        self.key_norm = nn.Parameter(torch.empty(size.hidden_size))
        self.recency = nn.Parameter(torch.empty(1))
        self.has_gate = start == "identity"
        if self.has_gate:
            self.identity_start = ""
            self.cost = gated_cost(self.cost, size, 1)
            self.gate = nn.Parameter(torch.empty(1))
            self.fp32_parameters = ("gate",)

    def snapshots(self, layers: int) -> int:
        """Return the number of snapshots in the first `layers` layers.

        A layer ends with a snapshot if at least block_size sublayers have written since the last one.
        """
        layers_per_block = -(-self.block_size // 2)
        return layers // layers_per_block

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.fill_({"query": 0.0, "key_norm": 1.0, "recency": 3.0, "gate": 0.0}[name])

    def open(self, embedding_btd: Tensor) -> State:
        return State((embedding_btd,), embedding_btd)

    def read(self, state: State, weights: Tensor | None = None) -> tuple[Inputs, tuple[Partial, ...]]:
        ahead: tuple[Partial, ...] = ()
        if weights is None and self.edit is not None:
            weights = self.weights(state)
        if weights is not None:
            h = weighted_sum(weights, state.sources)
        else:
            assert self.read_ahead is not None
            (h,), ahead = self.read_ahead.read(state.sources, state.ahead)
        return (interpolate(state.running_sum, h, self.gate) if self.has_gate else h,), ahead

    def weights(self, state: State) -> Tensor:
        """Return alpha_nbt of the sources."""
        *blocks_nbt, newest_bt = source_scores(self.query * self.key_norm, state.sources, self.eps)
        alpha_nbt = torch.stack([*blocks_nbt, newest_bt + self.recency]).softmax(0)
        # the running sum has the number after the last snapshot of the decoder
        sources = *range(self.num_sources - 1), 1 + self.snapshots(self.spec.num_layers)
        return self.edited(alpha_nbt, ("source", "batch", "token"), sources, normalized=True)

    def extend(self, partial: Partial, recent: Sequence[Tensor]) -> Tensor:
        bias_n = torch.cat([self.recency.new_zeros(len(recent) - 1), self.recency])
        return add_sources(partial, recent, self.eps, bias_n)

    def write(self, state: State, output_btd: Tensor, carry: tuple[Partial, ...]) -> State:
        running_sum = state.running_sum + output_btd
        taken = (running_sum,) if self.takes_snapshot else ()
        return State((*state.snapshots, *taken), running_sum, carry)

    def figures(self, state: State) -> list[Figure]:
        return [figure(self.weights(state), "then snapshots; last the running sum")] + (
            [gate_figure(self.gate)] if self.has_gate else []
        )
