"""Generalised residual networks and DeepCrossAttention (arXiv 2502.06785).

Each block reads a learned combination of all earlier block outputs. In v3 the combination depends on the input.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from depthlm.kernels.depth_reduce import source_scores, weighted_sum
from depthlm.kernels.gated_residuals.reference import gated_reads, weighted_reads
from depthlm.model.connections.connection import Connection, Inputs, Stream
from depthlm.model.connections.phases import READS, phase_of
from depthlm.model.settings import at_least, boolean, check, one_of
from depthlm.model.shape import Backbone, Size
from depthlm.model.sublayer_spec import SublayerSpec


class GRN(Connection):
    """Generalised residual network: every block reads a learned combination of all earlier block outputs.

    Before block t: g = sum_j beta_j * G_j, with G = [embedding, output of block 1, ..., output of block t-1].

    v1 (section 3.1): beta_j = b_j, a scalar. v2: beta_j = b_j in R^D. v3: beta_j = relu(b_j + w_j . G_j), a gate.
    In DeepCrossAttention (section 3.2), q, k and v are three reads with their own b and w.

    G --+-> g_q, g_k, g_v -> attention --+--(+)-> MLP input -> MLP -(+)-> output of block t, appended to G
        |       `--------------------------- ^                       ^
        |                                `----------------------------'

    A block is one layer. Its output is attention + MLP without the skip, so with the initial b = 1 and w = 0, g equals
    the residual stream of vanilla. A last read gives the final hidden state. The stream is G, and between attention and
    MLP it is [*G, attention output, h]. In both cases the reads follow that the first block of a phase has made ahead
    for the later blocks.

    version: 1, 2 or 3, as above.
    last_k: k; G is then [embedding, sum of the older outputs, the last k outputs]; None: G contains all outputs.
    own_embedding: with last_k, whether the embedding is a source of its own; if not, it is added to the older outputs.
    gate: for v3; relu_of_sum, as above, or printed, the paper's b_j + relu(w_j . G_j), whose w gets no gradient at 0.
    w: for v3; per_source, which matches the paper's parameter counts, or shared by all sources, as in the paper's text.
    separate_qkv: whether q, k and v have separate reads, as in DeepCrossAttention.
    """

    def __init__(
        self,
        spec: SublayerSpec,
        size: Size,
        backbone: Backbone,
        version: int = 3,
        last_k: int | None = None,
        own_embedding: bool = True,
        gate: str = "relu_of_sum",
        w: str = "per_source",
        separate_qkv: bool = False,
    ):
        super().__init__(spec, size, backbone)
        check(
            one_of((1, 2, 3), version=version),
            at_least(1, last_k=last_k, optional=True),
            one_of(("relu_of_sum", "printed"), gate=gate),
            one_of(("per_source", "shared"), w=w),
            boolean(own_embedding=own_embedding, separate_qkv=separate_qkv),
        )
        if last_k is None and not own_embedding:
            raise ValueError("own_embedding=false: needs last_k")
        self.own_embedding = own_embedding
        self.version, self.last_k, self.gate, self.separate_qkv = version, last_k, gate, separate_qkv
        self.num_sources = spec.layer + 1 if last_k is None else min(spec.layer + 1, last_k + 1 + own_embedding)
        # the fused operators read all inputs in one pass, also those of later blocks
        self.fused = version == 1 or (version == 3 and gate == "relu_of_sum")
        self.phase: list[GRN] = [self]
        if spec.kind == "mlp":
            return
        widths = () if version == 1 else (size.hidden_size,)
        self.b = nn.Parameter(torch.empty(self.num_inputs, self.num_sources, *widths))
        if version == 3:
            self.w = nn.Parameter(torch.empty(self.num_inputs, 1 if w == "shared" else self.num_sources, *widths))
        self.optimizer_settings = {name: {"weight_decay": 0.0} for name, _ in self.named_parameters()}

    @property
    def num_inputs(self) -> int:
        return 3 if self.separate_qkv and self.spec.kind == "attention" else 1

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.fill_(1.0 if name == "b" else 0.0)

    def link(self, connections: Sequence[Connection]) -> None:
        # with last_k, the sum of the older outputs changes at every block, so it cannot be read ahead
        if self.fused and self.last_k is None and self.spec.kind != "mlp":
            readers = [c for c in connections if isinstance(c, GRN) and c.spec.kind != "mlp"]
            self.phase = phase_of(self, readers, max(1, READS // readers[0].num_inputs))

    def read(self, stream: Stream) -> tuple[Inputs, tuple[Tensor, Stream] | None]:
        if self.spec.kind == "mlp":
            return (stream[self.num_sources + 1],), None
        sources, read_ahead = stream[: self.num_sources], stream[self.num_sources :]
        if not self.fused:
            inputs = [self.combine(sources, i) for i in range(self.num_inputs)]
            return tuple(inputs), (inputs[0], [])
        old = self.phase[0].num_sources
        if self is self.phase[0]:
            g_sbtd = self.sum_up(self.phase, slice(0, old), sources, None)
            read_ahead = list(g_sbtd.split([c.num_inputs for c in self.phase]))
        g_sbtd, *read_ahead = read_ahead
        if recent := sources[old:]:
            g_sbtd = self.sum_up([self], slice(old, None), recent, g_sbtd)
        elif read_ahead:
            # a view would keep the memory of all reads that were made ahead
            g_sbtd = g_sbtd.clone()
        inputs = list(g_sbtd)
        return tuple(inputs), (inputs[0], read_ahead)

    def linear_read(self, stream: Stream) -> tuple[Inputs, tuple[Tensor, Stream] | None]:
        if self.spec.kind == "mlp" or self.version < 3:
            return self.read(stream)
        sources, inputs = stream[: self.num_sources], []
        for i in range(self.num_inputs):
            products = (beta.detach() * x for beta, x in zip(self.weights(stream, i), sources, strict=True))
            inputs.append(sum(products, torch.zeros_like(sources[0])))
        return tuple(inputs), (inputs[0], [])

    def sum_up(self, readers: "Sequence[GRN]", part: slice, sources: Stream, start_sbtd: Tensor | None) -> Tensor:
        """Return g_sbtd, all inputs of the readers, summed over a part of their sources and added to start_sbtd."""
        b_snd = torch.cat([c.b[:, part] for c in readers])
        if self.version == 1:
            return weighted_reads(b_snd, sources, start_sbtd)
        w_snd = torch.cat([(c.w if c.w.shape[1] == 1 else c.w[:, part]).expand(-1, len(sources), -1) for c in readers])
        return gated_reads(b_snd, w_snd, sources, start_sbtd)

    def combine(self, sources: Stream, i: int) -> Tensor:
        """Return g_btd, the i-th input."""
        g = weighted_sum(self.b[i], sources)
        return g if self.version == 2 else g + weighted_sum(self.scores(sources, i).relu(), sources)

    def scores(self, stream: Stream, i: int) -> Tensor:
        """Return w_j . G_j of v3 for all sources of the i-th input, [n, b, t]."""
        sources = stream[: self.num_sources]
        return source_scores(self.w[i].expand(len(sources), -1), sources, eps=None)

    def weights(self, stream: Stream, i: int) -> Iterator[Tensor]:
        """Yield beta_btd of v3 for each source of the i-th input."""
        for b_d, score_bt in zip(self.b[i], self.scores(stream, i), strict=True):
            score_bt1 = score_bt[..., None]
            yield (b_d + score_bt1).relu() if self.gate == "relu_of_sum" else b_d + score_bt1.relu()

    def write(self, stream: Stream, output_btd: Tensor, carry: tuple[Tensor, Stream] | None) -> Stream:
        sources, rest = stream[: self.num_sources], stream[self.num_sources :]
        if carry is not None:
            g, read_ahead = carry
            return [*sources, output_btd, output_btd + g, *read_ahead]
        attention_btd, _, *read_ahead = rest
        return [*self.shorten([*sources, attention_btd + output_btd]), *read_ahead]

    def shorten(self, stack: Stream) -> Stream:
        """Return the stack with the sum of all outputs that are older than the `last_k` newest."""
        first = int(self.own_embedding)
        if self.last_k is None or len(stack) <= self.last_k + first:
            return stack
        oldest, *older = stack[first : -self.last_k]
        # in the embedding's dtype, because this sum grows with depth like a residual stream
        return [*stack[:first], sum(older, oldest.to(stack[0].dtype)), *stack[-self.last_k :]]

    def materialize(self, stream: Stream) -> Stream:
        return stream[: self.num_sources + 2 * (self.spec.kind == "mlp")]

    def forward_flops(self, length: float, causal: bool) -> float:
        reads = 0 if self.spec.kind == "mlp" else self.num_inputs
        return (4.0 if self.version == 3 else 2.0) * reads * self.num_sources * self.size.hidden_size

    def io_values(self) -> float:
        reads = 0 if self.spec.kind == "mlp" else self.num_inputs
        return float(reads * self.size.hidden_size * ((2 if self.version == 3 else 1) * self.num_sources + 1))
