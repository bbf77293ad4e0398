"""Attention Residuals (arXiv 2603.15031): each sublayer reads an attention over the outputs of earlier sublayers."""

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
    """Every sublayer reads an attention over blocks of earlier sublayer outputs.

    Before sublayer l: h = sum_j alpha_j b_j, alpha = softmax_j(w . RMSNorm(b_j)), where w is the sublayer's query.
    The sources b_j are sums of `block_size` sublayer outputs, and b_0 is the embedding. From the second sublayer of a
    block on, the newest source is the running sum of that block. The stream is the list of sources, followed by the
    reads that the first sublayer of a phase has made ahead for the later sublayers.

    [b_0, ..., b_{n-1}, running sum] --attention over depth--> h -> sublayer -> output --(+)--> running sum
                                                                                  or new block: [..., b_n, output]

    block_size: sublayers per block; None: ceil(2L / 8). 1 is the full variant: every sublayer output is a source.
    query: static: a parameter; input_dependent: a projection of the newest source.
    mixing: softmax of the scores; sigmoid of each score; or scalars: a softmax of one parameter per source, without
        query and key norm.
    key_norm: whether the scores use RMSNorm(b_j) instead of b_j.
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
        # with a zero query, h is initially the mean of the sources, as in the paper
        tensor.fill_(1.0 if name == "key_norm" else 0.0)

    def link(self, connections: Sequence[Connection]) -> None:
        if self.two_phase:
            self.phase = phase_of(self, [c for c in connections if isinstance(c, AttentionResiduals)], READS)

    def read(self, stream: Stream) -> tuple[Inputs, Stream]:
        if not self.two_phase:
            return (weighted_sum(self.weights(stream), stream),), []
        first_reader = self.phase[0]
        # the running sum still changes, so it cannot be read ahead
        num_old = first_reader.num_sources - (not first_reader.begins_block)
        h, read_ahead = read_phase(self, stream, num_old)
        return (h,), read_ahead

    def linear_read(self, stream: Stream) -> tuple[Inputs, Stream]:
        return (weighted_sum(self.weights(stream).detach(), stream[: self.num_sources]),), []

    def weights(self, stream: Stream) -> Tensor:
        """Return alpha of the sources, [n, b, t], or [n] for scalars."""
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
        # in the embedding's dtype, like a residual stream
        return [*blocks, running_sum.to(sources[0].dtype) + output_btd, *carry]

    def materialize(self, stream: Stream) -> Stream:
        return stream[: self.num_sources]

    def forward_flops(self, length: float, causal: bool) -> float:
        return read_flops(self.size, self.num_sources, scored=self.mixing != "scalars")

    def io_values(self) -> float:
        return read_values(self.size, self.num_sources, scored=self.mixing != "scalars")


class AttentionResidualsRecency(Connection):
    """The variant of Attention Residuals that the Depth-Attention authors (arXiv 2606.05014) trained as a baseline.

    alpha = softmax_j(w . RMSNorm(b_j) + r [j is the running sum]), with a parameter r that is initially 3.
    The running sum starts as the embedding, adds every sublayer output and is never reset. A block is a snapshot of it
    at the end of a layer. The stream is [embedding, snapshots ..., running sum], followed by the reads that the first
    sublayer of a phase has made ahead for the later sublayers.

    block_size: sublayers between snapshots, which layers end, so an odd number is rounded up; None: ceil(2L / 8).
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
        """Return the number of snapshots in the first `layers` layers.

        A layer ends with a snapshot if at least block_size sublayers have written since the last one.
        """
        layers_per_block = -(-self.block_size // 2)
        return layers // layers_per_block

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.fill_({"query": 0.0, "key_norm": 1.0, "recency": 3.0}[name])

    def link(self, connections: Sequence[Connection]) -> None:
        self.phase = phase_of(self, [c for c in connections if isinstance(c, AttentionResidualsRecency)], READS)

    def open(self, embedding_btd: Tensor) -> Stream:
        return [embedding_btd, embedding_btd]

    def read(self, stream: Stream) -> tuple[Inputs, Stream]:
        first_reader = self.phase[0]
        # the running sum still changes, so it cannot be read ahead
        h, read_ahead = read_phase(self, stream, first_reader.num_sources - 1, self.recency)
        return (h,), read_ahead

    def linear_read(self, stream: Stream) -> tuple[Inputs, Stream]:
        return (weighted_sum(self.weights(stream).detach(), stream[: self.num_sources]),), []

    def weights(self, stream: Stream) -> Tensor:
        """Return alpha_nbt of the sources."""
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

    def forward_flops(self, length: float, causal: bool) -> float:
        return read_flops(self.size, self.num_sources)

    def io_values(self) -> float:
        return read_values(self.size, self.num_sources)


class Projection(nn.Linear):
    """A linear layer that is initialized to zero."""

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.zero_()


def read_phase(
    reader: AttentionResiduals | AttentionResidualsRecency,
    stream: Stream,
    num_old: int,
    newest_bias: Tensor | None = None,
) -> tuple[Tensor, Stream]:
    """Return h_btd of a reader, and the list that is read ahead for the later readers of its phase.

    The list contains, of each later reader, the output over the old sources, the query, and the log-sum-exp lse_bt.

    num_old: the number of sources that the first reader reads for all readers.
    newest_bias: a bias that is added to the score of the newest source.
    """
    sources, read_ahead = stream[: reader.num_sources], stream[reader.num_sources :]
    if reader is reader.phase[0]:
        query_sd = torch.stack([c.query for c in reader.phase])
        if reader.eps is not None:
            # the score is the product of query times weight of the key norm with x / rms(x)
            query_sd = query_sd * torch.stack([c.key_norm for c in reader.phase])
        out_sbtd, lse_sbt = depth_attend(query_sd, sources[:num_old], reader.eps)
        read_ahead = [y for one in zip(out_sbtd, query_sd, lse_sbt, strict=True) for y in one]
    h_btd, query_d, lse_bt, *later = read_ahead
    if recent := sources[num_old:]:
        bias_n = None
        if newest_bias is not None:
            bias_n = torch.cat([newest_bias.new_zeros(len(recent) - 1), newest_bias])
        start = h_btd[None], lse_bt[None]
        h_btd = depth_attend(query_d[None], recent, reader.eps, bias_n, start)[0].squeeze(0)
    elif later and h_btd.is_cuda:
        # the sublayer saves its input, and a view would keep the outputs of the whole phase in memory
        h_btd = h_btd.clone()
    return h_btd, later


def default_block_size(spec: SublayerSpec) -> int:
    """Return the block size for eight blocks, as the paper recommends. The last block may be shorter."""
    return -(-2 * spec.num_layers // 8)


def read_flops(size: Size, num_sources: int, scored: bool = True) -> float:
    """Return the FLOPs per token of a score and a weighted addition per source (Depth-Attention, appendix B.4)."""
    return (4.0 if scored else 2.0) * num_sources * size.hidden_size


def read_values(size: Size, num_sources: int, scored: bool = True) -> float:
    """Return the values per token: sources read for scores and for the sum, sum written (Depth-Attention, B.4)."""
    return float(size.hidden_size * ((2 if scored else 1) * num_sources + 1))
