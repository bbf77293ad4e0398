"""Highway networks (arXiv 1505.00387), a row of Table 5 of Attention Residuals (arXiv 2603.15031).

h <- (1 - g) * h + g * f(h),  g = sigmoid(W h + b) in R^D

h --+-> sublayer f --> * g --(+)-> h
    +-> W, b -> g             |
    `------------> * (1 - g) -'
"""

import torch
from torch import Tensor

from depthlm.model.connection import Connection, Cost, Hidden, Inputs
from depthlm.model.figures import Figure
from depthlm.model.layers import Linear
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.dtypes import upcast


class Highway(Connection):
    """A gate per channel between the input and the output of a sublayer.

    Assumed: the gate reads h without a norm. b is initially -3, since the highway paper recommends a negative b, with
    which a sublayer mostly passes its input.
    """

    why_undefined = "its gates forget old outputs, so a read is neither their sum nor their mean"

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__(spec, size, backbone)
        d = size.hidden_size
        if spec.kind != "final":
            self.gate = Gate(d, d)
            # h read for the gate, and the gate written and read
            self.cost = Cost(flops=4.0 * d, io_values=3.0 * d)

    def read(self, state: Hidden, weights: Tensor | None = None) -> tuple[Inputs, Tensor | None]:
        return (state.h,), self.weights(state) if weights is None else weights

    def weights(self, state: Hidden) -> Tensor | None:
        """Return g_btd."""
        # in 16 bits, 1 - g would be rounded, and its product over all sublayers would be wrong
        return None if self.spec.kind == "final" else upcast(self.gate(state.h)).sigmoid()

    def write(self, state: Hidden, output_btd: Tensor, carry: Tensor) -> Hidden:
        h, g = state.h, carry
        return Hidden(((1 - g) * h + g * output_btd).to(h.dtype))

    def figures(self, state: Hidden) -> list[Figure]:
        gate = self.weights(state)
        axes = ("batch", "token", "hidden")
        about = "the gate of each sublayer's output"
        return [] if gate is None else [Figure("gate", gate, axes, about, after=True)]


class Gate(Linear):
    """The linear layer of a gate that is initially nearly closed."""

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        if name == "weight":
            tensor.normal_(0, std, generator=generator)
        else:
            tensor.fill_(-3.0)
