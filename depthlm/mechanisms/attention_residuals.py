"""Attention Residuals (arXiv 2603.15031): each sublayer reads an attention over the outputs of earlier sublayers.

    h = sum_j alpha_j b_j,  alpha = softmax_j(w . RMSNorm(b_j))

before each sublayer, and once more before the final norm, each time with a query w and a weight of the norm of its own.
The sources b_j are sums of `block_size` sublayer outputs, and b_0 is the embedding. From the second sublayer of a block
on, the newest source is the running sum of that block.

    [b_0, ..., b_{n-1}, running sum] --attention over depth--> h -> sublayer -> output --(+)--> running sum
                                                                                  or new block: [..., b_n, output]
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.figures import Figure
from depthlm.model.read_ahead import Partial, ReadAhead
from depthlm.model.settings import at_least, boolean, check, one_of
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.attention_residuals.naive import depth_attend
from depthlm.ops.depth_reduce import source_scores, weighted_sum


class State(NamedTuple):
    """blocks: all sources; within a block, the last one is its running sum.

    ahead: for each later read of the phase, out_btd, query_d and lse_bt over the sources fixed when the phase began.
    """

    blocks: tuple[Tensor, ...]
    ahead: tuple[Partial, ...] = ()


class AttentionResiduals(Connection):
    """Every sublayer reads an attention over blocks of earlier sublayer outputs.

    block_size: sublayers per block; None: ceil(2L / 8). 1 is the full variant: every sublayer output is a source.
    query: static: a parameter; input_dependent: a projection of the newest source.
    mixing: softmax of the scores; sigmoid of each score; or scalars: a softmax of one parameter per source, without
        query and key norm.
    key_norm: whether the scores use RMSNorm(b_j) instead of b_j.
    """

    colour = "#D55E00"

    def __init__(
        self,
        spec: SublayerSpec,
        size: Size,
        backbone: Backbone,
        block_size: int | None = None,
        query: str = "static",
        mixing: str = "softmax",
        key_norm: bool = True,
    ):
        super().__init__(spec, size, backbone)
        check(
            at_least(1, block_size=block_size, optional=True),
            one_of(("static", "input_dependent"), query=query),
            one_of(("softmax", "sigmoid", "scalars"), mixing=mixing),
            boolean(key_norm=key_norm),
        )
        self.block_size = block_size or default_block_size(spec)
        self.mixing = mixing
        # None if the keys are not normalized
        self.eps = backbone.norm_eps if key_norm else None
        self.num_sources = 1 + -(-spec.sublayer // self.block_size)
        self.begins_block = spec.sublayer % self.block_size == 0
        self.cost = read_cost(size, self.num_sources, scored=mixing != "scalars")
        if query == "static" and mixing == "softmax":
            # the running sum still changes, so it cannot be read ahead
            self.read_ahead = ReadAhead(self, begin, self.extend, self.num_sources - (not self.begins_block))
        if mixing == "scalars":
            self.scores = nn.Parameter(torch.empty(self.num_sources))
            return
        if query == "static":
            self.query = nn.Parameter(torch.empty(size.hidden_size))
        else:
            self.query_proj = Projection(size.hidden_size, size.hidden_size, bias=False)
        if key_norm:
            self.key_norm = nn.Parameter(torch.empty(size.hidden_size))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        # a zero query gives equal weights: h is initially the mean of the sources, as in the paper; with sigmoid, half
        # their sum
        tensor.fill_(1.0 if name == "key_norm" else 0.0)

    def open(self, embedding_btd: Tensor) -> State:
        return State((embedding_btd,))

    def read(self, state: State, weights: Tensor | None = None) -> tuple[Inputs, tuple[Partial, ...]]:
        if weights is None and self.read_ahead is not None:
            h_btd, ahead = self.read_ahead.read(state.blocks, state.ahead)
            return (h_btd,), ahead
        alpha = self.weights(state) if weights is None else weights
        return (weighted_sum(alpha, state.blocks),), ()

    def weights(self, state: State) -> Tensor:
        """Return alpha_nbt of the sources, or alpha_n for scalars."""
        if self.mixing == "scalars":
            return self.scores.softmax(0)
        w = self.query_proj(state.blocks[-1]) if hasattr(self, "query_proj") else self.query
        score_nbt = source_scores(w * self.key_norm if self.eps is not None else w, state.blocks, self.eps)
        return score_nbt.softmax(0) if self.mixing == "softmax" else score_nbt.sigmoid()

    def extend(self, partial: Partial, recent: Sequence[Tensor]) -> Tensor:
        return add_sources(partial, recent, self.eps)

    def write(self, state: State, output_btd: Tensor, carry: tuple[Partial, ...]) -> State:
        if self.begins_block:
            return State((*state.blocks, output_btd), carry)
        *blocks, running_sum = state.blocks
        # in the embedding's dtype, like a residual stream
        return State((*blocks, running_sum.to(state.blocks[0].dtype) + output_btd), carry)

    def figures(self, state: State) -> list[Figure]:
        size = self.block_size
        sources = "then sublayer outputs" if size == 1 else f"then blocks of {size} sublayers"
        return [figure(self.weights(state), sources)]


class Projection(nn.Linear):
    """A linear layer that is initialized to zero."""

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.zero_()


def default_block_size(spec: SublayerSpec) -> int:
    """Return the block size that gives at most eight blocks; the paper recommends about eight."""
    return -(-2 * spec.num_layers // 8)


def begin(readers: Sequence[AttentionResiduals], sources: Sequence[Tensor]) -> list[Partial]:
    """Return out_btd, query_d and lse_bt of each reader over the sources."""
    query_sd = torch.stack([c.query for c in readers])
    if readers[0].eps is not None:
        # the score is the product of query times weight of the key norm with x / rms(x)
        query_sd = query_sd * torch.stack([c.key_norm for c in readers])
    out_spd, lse_sp = depth_attend(query_sd, sources, readers[0].eps)
    return list(zip(out_spd, query_sd, lse_sp, strict=True))


def add_sources(partial: Partial, recent: Sequence[Tensor], eps: float | None, bias_n: Tensor | None = None) -> Tensor:
    """Return h_btd over the sources of a partial result and the recent ones. bias_n: added to their scores."""
    out_btd, query_d, lse_bt = partial
    return depth_attend(query_d[None], recent, eps, bias_n, (out_btd[None], lse_bt[None]))[0].squeeze(0)


def read_cost(size: Size, num_sources: int, scored: bool = True) -> Cost:
    """Return the cost of a score and a weighted addition per source (Depth-Attention, arXiv 2606.05014, appendix B.4).

    Sources are read for the scores and for the sum, and the sum is written. As in that appendix, the loads that reading
    ahead saves do not count.
    """
    passes = 2 if scored else 1
    return Cost(2.0 * passes * num_sources * size.hidden_size, float(size.hidden_size * (passes * num_sources + 1)))


def figure(alpha: Tensor, sources: str) -> Figure:
    """Return the figure of alpha_nbt or alpha_n. sources: what follows the embedding."""
    axes = ("source", "batch", "token") if alpha.ndim > 1 else ("source",)
    about = "what each sublayer reads (Figure 8 of arXiv 2603.15031)"
    return Figure("weights", alpha, axes, about, f"source (0: embedding, {sources})")
