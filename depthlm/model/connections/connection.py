"""What a connection is: how a sublayer reads from, and writes to, the depth stream.

Shapes: b batch, t tokens, d hidden size.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from depthlm.model.shape import Backbone, Size
from depthlm.model.sublayer_spec import SublayerSpec

Stream = list[Tensor]
Inputs = tuple[Tensor, ...]


class Connection(nn.Module):
    """One per sublayer, and one for the final read. A decoder of L layers makes these moves:

        embedding_btd -> open -> stream
        2L times:   stream -> read -> inputs, carry;   f(inputs) -> output;   stream, output, carry -> write -> stream
        stream -> close -> hidden_btd -> final norm

    `open` is asked of the first, `close` of the last. The stream is a plain list of tensors, whose meaning belongs to
    the mechanism: it is all that passes from one sublayer to the next, and no move changes a list or tensor in place.
    Inputs are before the norm of a pre-norm backbone. A carry passes what a read computed to the write of the same
    sublayer: any value, or None.

    Two optional declarations: `optimizer_settings` (see `depthlm.model.parameters`) and `init_parameter` (see
    `depthlm.model.initialization`), needed as soon as the connection owns parameters.
    """

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__()
        self.spec, self.size = spec, size

    @property
    def num_inputs(self) -> int:
        """Inputs that `read` gives: 1, or 3 for q, k and v of an attention, each then with a norm of its own."""
        return 1

    def link(self, connections: "Sequence[Connection]") -> None:
        """Is called when a decoder has made all its connections, for reads that are made together with those of other
        sublayers; or with this one alone, where its parameters alone are at hand."""

    def open(self, embedding_btd: Tensor) -> Stream:
        """The stream at the bottom of the decoder."""
        return [embedding_btd]

    def read(self, stream: Stream) -> tuple[Inputs, Any]:
        """The inputs of this sublayer, x_btd each, and the carry. Every connection defines it."""
        raise NotImplementedError(f"{type(self).__name__} defines no read(stream)")

    def write(self, stream: Stream, output_btd: Tensor, carry: Any) -> Stream:
        """The stream after this sublayer. Every connection defines it."""
        raise NotImplementedError(f"{type(self).__name__} defines no write(stream, output_btd, carry)")

    def materialize(self, stream: Stream) -> Stream:
        """What this stream has by the mechanism's formula when its sublayer is about to read: without what was read
        ahead, and with what is yet to be written."""
        return stream

    def close(self, stream: Stream) -> Tensor:
        """The hidden state before the final norm: by default one more read."""
        return self.read(stream)[0][0]

    def forward_flops(self, length: int, causal: bool) -> float:
        """FLOPs per token of this connection beyond its `nn.Linear` children, in one forward pass."""
        return 0.0

    def io_values(self) -> float:
        """Activation values that its moves read and write per token, beyond those of the residual connection."""
        return 0.0

    def diagnostics(self, stream: Stream) -> dict[str, Tensor]:
        """What to log at validations of the read that this stream is about to get: names and tensors of any shape, of
        which the largest value over tokens and sublayers counts."""
        return {}


class ConnectionFactory(Protocol):
    """A class of connections, with its own settings bound (`functools.partial`)."""

    def __call__(self, spec: SublayerSpec, size: Size, backbone: Backbone) -> Connection: ...
