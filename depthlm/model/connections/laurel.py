"""LAuReL, the learned augmented residual layer (arXiv 2411.07501)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlm.kernels.depth_reduce import weighted_sum
from depthlm.model.connections.connection import Connection, Inputs, Stream
from depthlm.model.place import Place
from depthlm.model.settings import at_least, one_of
from depthlm.model.shape import Backbone, Size


class Laurel(Connection):
    """A learned term beside the skip of every sublayer, x_{i+1} = f(x_i) + g(x_i, x_{i-1}, ...).

    rw, residual weights (section 2.1):       alpha f(x_i) + beta x_i
    lr, low rank (section 2.2):               f(x_i) + B A x_i + x_i
    pa, previous activations (section 2.3):   f(x_i) + x_i + sum_{j=1..k} gamma_j B A x_{i-j}

    x_i --+-> sublayer f ---(+)-> x_{i+1}
          +--- skip --------^
          `--- B A x -------'       the stream is [x_{i-k}, ..., x_{i-1}, x_i] (pa), else [x_i]

    variant: rw, lr or pa. rank: r of A (r x D) and B (D x r, zero at the start). previous: k of pa.
    """

    def __init__(
        self, place: Place, size: Size, backbone: Backbone, variant: str = "pa", rank: int = 8, previous: int = 3
    ):
        super().__init__(place, size, backbone)
        one_of(("rw", "lr", "pa"), variant=variant)
        at_least(1, rank=rank, previous=previous)
        self.variant, self.rank, self.previous = variant, rank, previous
        self.num_previous = min(previous, place.sublayer) if variant == "pa" else 0
        self.low_rank = place.kind != "final" and (variant == "lr" or self.num_previous > 0)
        if place.kind == "final":
            return
        if variant == "rw":
            self.alpha = nn.Parameter(torch.empty(1))
            self.beta = nn.Parameter(torch.empty(1))
        if self.low_rank:
            self.down = nn.Parameter(torch.empty(rank, size.hidden_size))
            self.up = nn.Parameter(torch.empty(size.hidden_size, rank))
        if self.num_previous:
            self.gamma = nn.Parameter(torch.empty(self.num_previous))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        if name == "down":
            tensor.normal_(0, std, generator=generator)
        else:
            tensor.fill_(0.0 if name == "up" else 1.0)

    def read(self, stream: Stream) -> tuple[Inputs, None]:
        return (stream[-1],), None

    def write(self, stream: Stream, output_btd: Tensor, carry: None) -> Stream:
        *previous, x = stream
        if self.variant == "rw":
            return [self.alpha * output_btd + self.beta * x]
        y = x + output_btd
        if self.variant == "lr":
            return [y + self.product(x)]
        if previous:
            # B A is linear: one product serves all k
            y = y + self.product(weighted_sum(self.gamma, previous[::-1]))
        return [*stream, y][-self.previous - 1 :]

    def product(self, x_btd: Tensor) -> Tensor:
        """B A x."""
        return F.linear(F.linear(x_btd, self.down), self.up)

    def forward_flops(self, length: int, causal: bool) -> float:
        d = self.size.hidden_size
        return 4.0 * self.rank * d * self.low_rank + 2.0 * d * self.num_previous * self.low_rank

    def io_values(self) -> float:
        d = self.size.hidden_size
        return float((d * max(self.num_previous, 1) + 2 * self.rank + d) * self.low_rank)
