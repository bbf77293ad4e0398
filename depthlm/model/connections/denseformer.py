"""DenseFormer (arXiv 2402.02622): each block's input is a learned average of all earlier block outputs."""

import torch
from torch import Tensor, nn

from depthlm.kernels.depth_reduce import weighted_sum
from depthlm.model.connections.connection import Connection, Inputs, Stream
from depthlm.model.place import Place
from depthlm.model.settings import at_least, check
from depthlm.model.shape import Backbone, Size


class DenseFormer(Connection):
    """Depth-weighted averaging after every block: Y_i = sum_{j <= i} a_ij X_j.

    X_0 is the embedding, X_i the output of block i before its own average, Y_i the input of block i + 1. Within a block
    the connection is residual. The stream is [X_0, ..., X_i, h], where h is Y_i between blocks.

    X_0 ... X_{i-1} -----------------------------.
    h = Y_{i-1} -> attention -> + -> MLP -> + -> X_i -> a_i . X -> Y_i

    period: an average after every period-th block only; the others pass X_i on.
    dilation: the average reads only the X_j with j = i modulo dilation.
    """

    def __init__(self, place: Place, size: Size, backbone: Backbone, period: int = 1, dilation: int = 1):
        super().__init__(place, size, backbone)
        check(at_least(1, period=period, dilation=dilation))
        if period > place.num_layers:
            raise ValueError(f"period={period}: the {place.num_layers} layers end before the first average")
        block = place.layer + 1
        self.sources: range | None = None
        if place.kind == "mlp" and block % period == 0:
            self.sources = range(block % dilation, block + 1, dilation)
            self.a = nn.Parameter(torch.empty(len(self.sources)))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor[-1] = 1.0  # Y_i = X_i: the decoder starts as vanilla

    def open(self, embedding_btd: Tensor) -> Stream:
        return [embedding_btd, embedding_btd]

    def read(self, stream: Stream) -> tuple[Inputs, None]:
        return (stream[-1],), None

    def write(self, stream: Stream, output_btd: Tensor, carry: None) -> Stream:
        *history, h = stream
        h = h + output_btd
        if self.place.kind == "attention":
            return [*history, h]
        history = [*history, h]
        if self.sources is None:
            return [*history, h]
        return [*history, weighted_sum(self.a, [history[j] for j in self.sources])]

    def forward_flops(self, length: int, causal: bool) -> float:
        return 2.0 * self.size.hidden_size * len(self.sources or ())

    def io_values(self) -> float:
        return float(self.size.hidden_size * (len(self.sources) + 1)) if self.sources else 0.0
