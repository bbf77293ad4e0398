"""LAuReL, the learned augmented residual layer (arXiv 2411.07501)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlm.kernels.depth_reduce import weighted_sum
from depthlm.model.connections.connection import Connection, Inputs, Stream
from depthlm.model.settings import at_least, check, one_of
from depthlm.model.shape import Backbone, Size
from depthlm.model.sublayer_spec import SublayerSpec


class Laurel(Connection):
    """A residual connection with learned weights or a learned low-rank term, x_{i+1} = f(x_i) + g(x_i, x_{i-1}, ...).

    rw, residual weights:       alpha f(x_i) + beta x_i
    lr, low rank:               f(x_i) + B A x_i + x_i
    pa, previous activations:   f(x_i) + x_i + sum_{j=0..k-1} gamma_j B A x_{i-j}

    x_i --+-> sublayer f ---(+)-> x_{i+1}
          +--- skip --------^
          `--- B A x -------'       the stream is [x_{i-k+1}, ..., x_i] (pa), else [x_i]

    variant: rw, lr or pa.
    rank: r of A (r x D) and B (D x r, initially zero), for lr and pa.
    last_k: k, for pa. It counts the input of this sublayer.
    """

    def __init__(
        self, spec: SublayerSpec, size: Size, backbone: Backbone, variant: str = "pa", rank: int = 8, last_k: int = 3
    ):
        super().__init__(spec, size, backbone)
        check(one_of(("rw", "lr", "pa"), variant=variant), at_least(1, rank=rank, last_k=last_k))
        self.variant, self.rank, self.last_k = variant, rank, last_k
        if spec.kind == "final":
            return
        if variant == "rw":
            self.alpha = nn.Parameter(torch.empty(1))
            self.beta = nn.Parameter(torch.empty(1))
            return
        self.down = nn.Parameter(torch.empty(rank, size.hidden_size))
        self.up = nn.Parameter(torch.empty(size.hidden_size, rank))
        if variant == "pa":
            self.gamma = nn.Parameter(torch.empty(min(last_k, spec.sublayer + 1)))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        if name == "down":
            tensor.normal_(0, std, generator=generator)
        else:
            tensor.fill_(0.0 if name == "up" else 1.0)

    def read(self, stream: Stream) -> tuple[Inputs, None]:
        return (stream[-1],), None

    def write(self, stream: Stream, output_btd: Tensor, carry: None) -> Stream:
        x = stream[-1]
        if self.variant == "rw":
            return [self.alpha * output_btd + self.beta * x]
        # B A is linear, so it is applied once to the weighted sum
        z = x if self.variant == "lr" else weighted_sum(self.gamma, stream[::-1])
        y = x + output_btd + F.linear(F.linear(z, self.down), self.up)
        return [*stream, y][-self.last_k :] if self.variant == "pa" else [y]

    def forward_flops(self, length: float, causal: bool) -> float:
        d = self.size.hidden_size
        if hasattr(self, "alpha"):
            return 2.0 * d
        return 4.0 * self.rank * d * self.low_rank + 2.0 * d * self.num_sources

    def io_values(self) -> float:
        """Return the values of the sources read, of x read for A, and of the products with A and B written and read."""
        d = self.size.hidden_size
        return float(d * self.num_sources + 2 * (d + self.rank)) if self.low_rank else 0.0

    @property
    def low_rank(self) -> bool:
        """Whether this connection has A and B."""
        return hasattr(self, "down")

    @property
    def num_sources(self) -> int:
        """The number of sublayer inputs that pa sums."""
        return len(self.gamma) if hasattr(self, "gamma") else 0
