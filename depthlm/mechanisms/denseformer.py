"""DenseFormer (arXiv 2402.02622): each block's input is a weighted sum of earlier block outputs.

    Y_i = sum_{j <= i} a_ij X_j

with the embedding X_0 = Y_0, the output X_i of block i before its average, and the input Y_i of block i + 1; the last
Y_i goes to the final norm. The paper calls the sum an average, but its weights need not sum to 1.

    X_0 ... X_{i-1} -----------------------------.
    h = Y_{i-1} -> attention -> + -> MLP -> + -> X_i -> a_i . X -> Y_i
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.edges import per_token
from depthlm.model.figures import Figure
from depthlm.model.read_ahead import Partial, ReadAhead
from depthlm.model.settings import at_least, check
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.denseformer.naive import weighted_reads
from depthlm.ops.depth_reduce import weighted_sum


class State(NamedTuple):
    """blocks: X_0, ..., X_i. h: Y_i between blocks, else the residual stream within block i + 1.

    ahead: of each later average of a phase, its sum over the blocks that existed when the phase began.
    """

    blocks: tuple[Tensor, ...]
    h: Tensor
    ahead: tuple[Partial, ...] = ()


class DenseFormer(Connection):
    """Depth-weighted averaging after every block. A block is one layer, within which the connection is residual.

    period: only every period-th block is followed by an average; after all others Y_i = X_i.
    dilation: the average reads only the X_j with j = i modulo dilation.
    """

    colour = "#E69F00"
    identity_start = ""
    accumulates = "sum"
    # every average has one for each block before it, and multiplies whole hidden states
    depth_exponents: ClassVar = {"a": 2.0}

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone, period: int = 1, dilation: int = 1):
        super().__init__(spec, size, backbone)
        check(at_least(1, period=period, dilation=dilation))
        if period > spec.num_layers:
            raise ValueError(f"period={period}: the {spec.num_layers} layers end before the first average")
        if dilation > spec.num_layers:
            raise ValueError(f"dilation={dilation}: no average of {spec.num_layers} layers reads that far below itself")
        block = spec.layer + 1
        self.sources: range | None = None
        if spec.kind == "mlp" and block % period == 0:
            self.sources = range(block % dilation, block + 1, dilation)
            n = len(self.sources)
            self.a = nn.Parameter(torch.empty(n))
            self.cost = Cost(2.0 * size.hidden_size * n, float(size.hidden_size * (n + 1)))
            # with a dilation, the sources of an average do not begin with those of the one before
            self.read_ahead = ReadAhead(self, self.begin, self.extend, n) if dilation == 1 else None

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        # the others are zero: Y_i = X_i, so initially the decoder equals vanilla
        tensor[-1] = 1.0

    def open(self, embedding_btd: Tensor) -> State:
        return State((embedding_btd,), embedding_btd)

    def read(self, state: State, weights: None = None) -> tuple[Inputs, None]:
        return (state.h,), None

    def write(self, state: State, output_btd: Tensor, carry: None) -> State:
        h = state.h + output_btd
        if self.spec.kind == "attention":
            return state._replace(h=h)
        blocks, ahead = (*state.blocks, h), state.ahead
        if self.sources is not None:
            h, ahead = self.average([blocks[j] for j in self.sources], ahead)
        return State(blocks, h, ahead)

    def average(self, sources: Sequence[Tensor], ahead: tuple[Partial, ...]) -> tuple[Tensor, tuple[Partial, ...]]:
        """Return Y_i, and the sums that are made ahead for the later averages of the phase."""
        if self.edit is not None:
            a_nbt = self.edited(per_token(self.a, sources[0]), ("source", "batch", "token"), self.sources or ())
            return weighted_sum(a_nbt, sources), ()
        if self.read_ahead is not None:
            return self.read_ahead.read(sources, ahead)
        return weighted_reads(self.a[None], sources).squeeze(0), ()

    def begin(self, averages: "Sequence[DenseFormer]", sources: Sequence[Tensor]) -> list[Partial]:
        return [(y,) for y in weighted_reads(torch.stack([c.a[: len(sources)] for c in averages]), sources)]

    def extend(self, partial: Partial, sources: Sequence[Tensor]) -> Tensor:
        (y_btd,) = partial
        return weighted_reads(self.a[None, -len(sources) :], sources, y_btd[None]).squeeze(0)

    def figures(self, state: State) -> list[Figure]:
        if self.sources is None:
            return []
        about = "the weights of the average after each block, over all blocks up to it"
        columns = "source (0: embedding, j: output of block j)"
        return [Figure("a", self.a, ("source",), about, columns, places=self.sources)]
