"""DenseFormer (arXiv 2402.02622): each block's input is a learned average of all earlier block outputs."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from depthlm.kernels.gated_residuals.reference import weighted_reads
from depthlm.model.connections.connection import Connection, Inputs, Stream
from depthlm.model.connections.phases import READS, phase_of
from depthlm.model.settings import at_least, check
from depthlm.model.shape import Backbone, Size
from depthlm.model.sublayer_spec import SublayerSpec


class DenseFormer(Connection):
    """Depth-weighted averaging after every block: Y_i = sum_{j <= i} a_ij X_j.

    A block is one layer. X_0 is the embedding, X_i the output of block i before its average, and Y_i the input of block
    i + 1. Within a block the connection is residual. The stream is [X_0, ..., X_i, h], where h is Y_i between blocks,
    followed by the sums that the first average of a phase has read ahead for the later averages.

    X_0 ... X_{i-1} -----------------------------.
    h = Y_{i-1} -> attention -> + -> MLP -> + -> X_i -> a_i . X -> Y_i

    period: only every period-th block is followed by an average; after all others Y_i = X_i.
    dilation: the average reads only the X_j with j = i modulo dilation.
    """

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone, period: int = 1, dilation: int = 1):
        super().__init__(spec, size, backbone)
        check(at_least(1, period=period, dilation=dilation))
        if period > spec.num_layers:
            raise ValueError(f"period={period}: the {spec.num_layers} layers end before the first average")
        if dilation > spec.num_layers:
            raise ValueError(f"dilation={dilation}: no average of {spec.num_layers} layers reads that far below itself")
        block = spec.layer + 1
        self.sources: range | None = None
        self.phase, self.dilation = [self], dilation
        if spec.kind == "mlp" and block % period == 0:
            self.sources = range(block % dilation, block + 1, dilation)
            self.a = nn.Parameter(torch.empty(len(self.sources)))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor[-1] = 1.0  # Y_i = X_i: initially the decoder equals vanilla

    def link(self, connections: Sequence[Connection]) -> None:
        averages = [c for c in connections if isinstance(c, DenseFormer) and c.sources]
        # with a dilation, consecutive averages read different sources
        self.phase = phase_of(self, averages, READS if self.dilation == 1 else 1) if self.sources else [self]

    def open(self, embedding_btd: Tensor) -> Stream:
        return [embedding_btd, embedding_btd]

    def read(self, stream: Stream) -> tuple[Inputs, None]:
        return (stream[self.spec.layer + 1],), None

    def write(self, stream: Stream, output_btd: Tensor, carry: None) -> Stream:
        block = self.spec.layer + 1
        history, h, read_ahead = stream[:block], stream[block] + output_btd, stream[block + 1 :]
        if self.spec.kind == "attention":
            return [*history, h, *read_ahead]
        history = [*history, h]
        if self.sources is None:
            return [*history, h, *read_ahead]
        return [*history, *self.average([history[j] for j in self.sources], read_ahead)]

    def average(self, sources: list[Tensor], read_ahead: Stream) -> Stream:
        """Return Y_i, followed by the sums that were read ahead for the later averages of the phase."""
        old = self.phase[0].a.numel()
        if self is self.phase[0]:
            read_ahead = [*weighted_reads(torch.stack([c.a[:old] for c in self.phase]), sources)]
        y, *later = read_ahead
        if recent := sources[old:]:
            y = weighted_reads(self.a[None, old:], recent, y[None]).squeeze(0)
        elif later:
            # a view would keep the memory of all sums that were read ahead
            y = y.clone()
        return [y, *later]

    def materialize(self, stream: Stream) -> Stream:
        return stream[: self.spec.layer + 2]

    def forward_flops(self, length: float, causal: bool) -> float:
        return 2.0 * self.size.hidden_size * len(self.sources or ())

    def io_values(self) -> float:
        return float(self.size.hidden_size * (len(self.sources) + 1)) if self.sources else 0.0
