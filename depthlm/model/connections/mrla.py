"""Layer attention after MRLA (arXiv 2302.03985), a row of Table 5 of Attention Residuals (arXiv 2603.15031)."""

import torch
from torch import Tensor, nn

from depthlm.kernels.depth_reduce import source_scores, weighted_sum
from depthlm.model.connections.connection import Connection, Inputs, Stream
from depthlm.model.layers import Linear
from depthlm.model.shape import Backbone, Size
from depthlm.model.sublayer_spec import SublayerSpec


class MRLA(Connection):
    """Every sublayer reads a sum over all earlier outputs X_j, with gates that depend on the newest output X_s.

    h_s = sum_{j=1..s} alpha_j v_j,  alpha_j = sigmoid(W_q X_s) . sigmoid(W_k X_j) / e,  v_j = c_j * X_j,  c_j in R^D

    The stream is [k_1, v_1, ..., k_{s-1}, v_{s-1}, X_s]. X_0 is the embedding. As in the table, only the first sublayer
    reads it.

    Assumed: ConvPool is a projection of the token to e = head_size, because a mean over an image has no causal
    counterpart. Conv is one weight per channel, MRLA's depthwise convolution at a single position. Both belong to
    the output that they read, and sigma is a sigmoid. Table 5 omits norms; ours is the mean over e in place of the sum.
    """

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__(spec, size, backbone)
        self.num_sources = spec.sublayer
        if self.num_sources:
            self.q_proj, self.k_proj = (Linear(size.hidden_size, size.head_size, bias=False) for _ in "qk")
            self.c = nn.Parameter(torch.empty(size.hidden_size))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.fill_(1.0)

    def read(self, stream: Stream) -> tuple[Inputs, Stream]:
        return self.gated_sum(stream, constant=False)

    def linear_read(self, stream: Stream) -> tuple[Inputs, Stream]:
        return self.gated_sum(stream, constant=True)

    def gated_sum(self, stream: Stream, constant: bool) -> tuple[Inputs, Stream]:
        """Return h, and the keys and values with those of the newest output. constant: whether alpha is detached."""
        *entries, newest = stream
        if not self.num_sources:
            return (newest,), []
        entries += [self.k_proj(newest).sigmoid(), self.c * newest]
        alpha_nbt = source_scores(self.q_proj(newest).sigmoid() / self.size.head_size, entries[::2], eps=None)
        return (weighted_sum(alpha_nbt.detach() if constant else alpha_nbt, entries[1::2]),), entries

    def write(self, stream: Stream, output_btd: Tensor, carry: Stream) -> Stream:
        return [*carry, output_btd]

    def forward_flops(self, length: float, causal: bool) -> float:
        d, e = self.size.hidden_size, self.size.head_size
        return 2.0 * self.num_sources * (d + e) + (d if self.num_sources else 0.0)

    def io_values(self) -> float:
        """Return the values of the newest output and h, and of the keys and values written and read."""
        d, e = self.size.hidden_size, self.size.head_size
        return 2.0 * d + (d + e) * (self.num_sources + 1) if self.num_sources else 0.0
