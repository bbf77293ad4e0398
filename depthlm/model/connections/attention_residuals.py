"""Attention Residuals (arXiv 2603.15031): a sublayer's input is an attention over the outputs of those before it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from depthlm.kernels.attention_residuals.reference import depth_attend
from depthlm.kernels.depth_reduce import source_scores, weighted_sum
from depthlm.model.connections.connection import Connection, Inputs, Stream
from depthlm.model.connections.phases import READS, phase_of
from depthlm.model.settings import at_least, boolean, check, one_of
from depthlm.model.shape import Backbone, Size
from depthlm.model.sublayer_spec import SublayerSpec


class AttentionResiduals(Connection):
    """Before every sublayer l: h = sum_j alpha_j b_j, alpha = softmax_j(w . RMSNorm(b_j)), with w its pseudo-query.

    The sources b_j are sums of `block_size` sublayer outputs. b_0 is the embedding; the newest source is the running
    sum of the block at work, which is there from the block's second sublayer on. The stream is that list, and behind
    it what the first sublayer of a phase has read for the later ones.

    [b_0, ..., b_{n-1}, running sum] --attention over depth--> h -> sublayer -> output --(+)--> running sum
                                                                                  or a new block: [..., b_n, output]

    block_size: sublayers of a block; None: ceil(2L / 8). 1 is the full variant: every sublayer output is a source.
    query: static, a parameter; input_dependent, a projection of the newest source.
    mixing: softmax; sigmoid of each score alone; or scalars, a softmax over parameters in place of scores, which have
        neither query nor key norm.
    key_norm: whether the score sees RMSNorm(b_j) or b_j.
    """

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
        self.mixing, self.eps = mixing, backbone.norm_eps if key_norm else None
        self.num_sources = 1 + -(-spec.sublayer // self.block_size)
        self.begins_block = spec.sublayer % self.block_size == 0
        self.two_phase = query == "static" and mixing == "softmax"
        self.phase: list[AttentionResiduals] = [self]
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
        # a zero query makes the first h the mean of the sources, as the paper asks
        tensor.fill_(1.0 if name == "key_norm" else 0.0)

    def link(self, connections: Sequence[Connection]) -> None:
        if self.two_phase:
            self.phase = phase_of(self, [c for c in connections if isinstance(c, AttentionResiduals)], READS)

    def read(self, stream: Stream) -> tuple[Inputs, Stream]:
        if not self.two_phase:
            return (weighted_sum(self.weights(stream), stream),), []
        queries = torch.stack([c.key() for c in self.phase]) if self is self.phase[0] else self.key()[None]
        # all but the running sum of that time
        first = self.phase[0]
        h, waiting = read_phase(self, stream, queries, first.num_sources - (not first.begins_block))
        return (h,), waiting

    def key(self) -> Tensor:
        """The query times the weight of the key norm: what x / rms(x) is multiplied with."""
        return self.query if self.eps is None else self.query * self.key_norm

    def weights(self, stream: Stream) -> Tensor:
        """alpha of the sources, [n, b, t], or [n] of scalars."""
        stream = stream[: self.num_sources]
        if self.mixing == "scalars":
            return self.scores.softmax(0)
        w = self.query_proj(stream[-1]) if hasattr(self, "query_proj") else self.query
        score_nbt = source_scores(w * self.key_norm if self.eps is not None else w, stream, self.eps)
        return score_nbt.softmax(0) if self.mixing == "softmax" else score_nbt.sigmoid()

    def write(self, stream: Stream, output_btd: Tensor, carry: Stream) -> Stream:
        sources = stream[: self.num_sources]
        if self.begins_block:
            return [*sources, output_btd, *carry]
        *blocks, running_sum = sources
        # in the embedding's type, as a residual stream
        return [*blocks, running_sum.to(sources[0].dtype) + output_btd, *carry]

    def materialize(self, stream: Stream) -> Stream:
        return stream[: self.num_sources]

    def forward_flops(self, length: int, causal: bool) -> float:
        return read_flops(self.size, self.num_sources, scored=self.mixing != "scalars")

    def io_values(self) -> float:
        return read_values(self.size, self.num_sources, scored=self.mixing != "scalars")


class AttentionResidualsRecency(Connection):
    """The variant that the Depth-Attention authors (arXiv 2606.05014) trained as their baseline.

    alpha = softmax_j(w . RMSNorm(b_j) + r [j is the running sum]), with r a parameter that starts at 3.
    The running sum starts as the embedding, takes every output and is never reset; a block is a snapshot of it at the
    end of a layer. The stream is [embedding, snapshots ..., running sum], and behind it what the first sublayer of a
    phase has read for the later ones.

    block_size: sublayers between snapshots; None: ceil(2L / 8).
    """

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone, block_size: int | None = None):
        super().__init__(spec, size, backbone)
        check(at_least(1, block_size=block_size, optional=True))
        self.block_size = block_size or default_block_size(spec)
        self.eps = backbone.norm_eps
        self.num_sources = 2 + self.snapshots(spec.layer)
        self.takes_snapshot = spec.kind == "mlp" and self.snapshots(spec.layer + 1) > self.snapshots(spec.layer)
        self.phase: list[AttentionResidualsRecency] = [self]
        self.query = nn.Parameter(torch.empty(size.hidden_size))
        self.key_norm = nn.Parameter(torch.empty(size.hidden_size))
        self.recency = nn.Parameter(torch.empty(1))

    def snapshots(self, layers: int) -> int:
        """How many were taken in the first so many layers: one for every multiple of block_size that they pass."""
        per_layer = 2
        return sum(
            per_layer * (layer + 1) // self.block_size > per_layer * layer // self.block_size for layer in range(layers)
        )

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.fill_({"query": 0.0, "key_norm": 1.0, "recency": 3.0}[name])

    def link(self, connections: Sequence[Connection]) -> None:
        self.phase = phase_of(self, [c for c in connections if isinstance(c, AttentionResidualsRecency)], READS)

    def open(self, embedding_btd: Tensor) -> Stream:
        return [embedding_btd, embedding_btd]

    def read(self, stream: Stream) -> tuple[Inputs, Stream]:
        first = self.phase[0]
        queries = torch.stack([c.query * c.key_norm for c in (self.phase if self is first else [self])])
        # all but the running sum of that time
        h, waiting = read_phase(self, stream, queries, first.num_sources - 1, self.recency)
        return (h,), waiting

    def weights(self, stream: Stream) -> Tensor:
        """alpha_nbt of the sources."""
        score_nbt = source_scores(self.query * self.key_norm, stream[: self.num_sources], self.eps)
        *blocks_nbt, newest_bt = score_nbt
        return torch.stack([*blocks_nbt, newest_bt + self.recency]).softmax(0)

    def write(self, stream: Stream, output_btd: Tensor, carry: Stream) -> Stream:
        *blocks, running_sum = stream[: self.num_sources]
        running_sum = running_sum + output_btd
        if self.takes_snapshot:
            blocks = [*blocks, running_sum]
        return [*blocks, running_sum, *carry]

    def materialize(self, stream: Stream) -> Stream:
        return stream[: self.num_sources]

    def forward_flops(self, length: int, causal: bool) -> float:
        return read_flops(self.size, self.num_sources)

    def io_values(self) -> float:
        return read_values(self.size, self.num_sources)


class Projection(nn.Linear):
    """A linear layer that starts at zero."""

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.zero_()


def read_phase(
    reader: AttentionResiduals | AttentionResidualsRecency,
    stream: Stream,
    query_sd: Tensor,
    num_old: int,
    newest_bias: Tensor | None = None,
) -> tuple[Tensor, Stream]:
    """h_btd of a reader, and what waits behind the sources for the later readers of its phase: their outputs over the
    old sources, and the log-sum-exps, lse_sbt, of all that wait.

    query_sd: of the whole phase for its first reader, else of this one. num_old: sources that the first reader reads
    for all. newest_bias: is added to the score of the newest source.
    """
    sources, waiting = stream[: reader.num_sources], stream[reader.num_sources :]
    if reader is reader.phase[0]:
        out_sbtd, lse_sbt = depth_attend(query_sd, sources[:num_old], reader.eps)
        waiting = [*out_sbtd, lse_sbt]
    h_btd, *later, lse_sbt = waiting
    if recent := sources[num_old:]:
        bias_n = None
        if newest_bias is not None:
            bias_n = torch.cat([newest_bias.new_zeros(len(recent) - 1), newest_bias])
        start = h_btd[None], lse_sbt[-1 - len(later)][None]
        h_btd = depth_attend(query_sd[:1], recent, reader.eps, bias_n, start)[0][0]
    return h_btd, [*later, lse_sbt] if later else []


def default_block_size(spec: SublayerSpec) -> int:
    """Eight blocks, the paper's recommendation; the last may be short."""
    return -(-2 * spec.num_layers // 8)


def read_flops(size: Size, num_sources: int, scored: bool = True) -> float:
    """A score and a product with its weight for each source (Depth-Attention, appendix B.4)."""
    return (4.0 if scored else 2.0) * num_sources * size.hidden_size


def read_values(size: Size, num_sources: int, scored: bool = True) -> float:
    """Each source read for its score and for the sum, which is written (Depth-Attention, appendix B.4)."""
    return float(size.hidden_size * ((2 if scored else 1) * num_sources + 1))
