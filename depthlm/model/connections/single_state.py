"""Residual connections with weights: ReZero (arXiv 2003.04887) and highway networks (arXiv 1505.00387).

Both are rows of Table 5 of Attention Residuals (arXiv 2603.15031). The stream is one tensor.
"""

import torch
from torch import Tensor, nn

from depthlm.kernels.dtypes import upcast
from depthlm.model.connections.connection import Connection, Inputs, Stream
from depthlm.model.layers import Linear
from depthlm.model.shape import Backbone, Size
from depthlm.model.sublayer_spec import SublayerSpec


class ReZero(Connection):
    """h <- h + alpha f(h), with one parameter alpha for each sublayer, initially zero.

    Assumed: the sublayers keep the norms of the backbone. The paper removes them, but Table 5 omits all norms.
    """

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__(spec, size, backbone)
        if spec.kind != "final":
            self.alpha = nn.Parameter(torch.empty(1))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.zero_()

    def read(self, stream: Stream) -> tuple[Inputs, None]:
        return (stream[0],), None

    def write(self, stream: Stream, output_btd: Tensor, carry: None) -> Stream:
        return [stream[0] + self.alpha * output_btd]

    def forward_flops(self, length: float, causal: bool) -> float:
        return 0.0 if self.spec.kind == "final" else 1.0 * self.size.hidden_size


class Highway(Connection):
    """h <- (1 - g) * h + g * f(h), with a gate g = sigmoid(W h + b) in R^D.

    h --+-> sublayer f --> * g --(+)-> h
        +-> W, b -> g             |
        `------------> * (1 - g) -'

    Assumed: the gate reads h without a norm. b is initially -3, since the highway paper recommends a negative b, with
    which a sublayer mostly passes its input.
    """

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__(spec, size, backbone)
        self.gate = Gate(size.hidden_size, size.hidden_size) if spec.kind != "final" else None

    def read(self, stream: Stream) -> tuple[Inputs, Tensor | None]:
        (h,) = stream
        # in 16 bits, 1 - g would be rounded, and its product over all sublayers would be wrong
        return (h,), None if self.gate is None else upcast(self.gate(h)).sigmoid()

    def linear_read(self, stream: Stream) -> tuple[Inputs, Tensor | None]:
        inputs, g = self.read(stream)
        return inputs, None if g is None else g.detach()

    def write(self, stream: Stream, output_btd: Tensor, carry: Tensor) -> Stream:
        (h,), g = stream, carry
        return [((1 - g) * h + g * output_btd).to(h.dtype)]

    def forward_flops(self, length: float, causal: bool) -> float:
        return 0.0 if self.gate is None else 4.0 * self.size.hidden_size

    def io_values(self) -> float:
        """Return the values of h read for the gate, and of the gate written and read."""
        return 0.0 if self.gate is None else 3.0 * self.size.hidden_size


class Gate(Linear):
    """The linear layer of a gate that is initially nearly closed."""

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        if name == "weight":
            tensor.normal_(0, std, generator=generator)
        else:
            tensor.fill_(-3.0)
