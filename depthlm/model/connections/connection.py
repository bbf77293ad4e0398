"""The interface of a connection: how a sublayer reads from the depth stream and writes to it.

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
    """How one sublayer reads from the depth stream and writes to it.

    A decoder has one connection per sublayer and one for the final read. A decoder of L layers makes these calls:

        embedding_btd -> open -> stream
        2L times:   stream -> read -> inputs, carry;   f(inputs) -> output;   stream, output, carry -> write -> stream
        stream -> close -> hidden_btd -> final norm

    The decoder calls `open` of the first connection and `close` of the last one. The stream is a plain list of tensors,
    and each mechanism defines their meaning. The stream is the only state that passes from one sublayer to the next. No
    method changes a list or a tensor in place. With a pre-norm backbone, the layer normalizes the inputs after `read`.
    The carry is any value that `read` computes for the `write` of the same sublayer, or None.

    A subclass that owns parameters must define `init_parameter` (see `depthlm.model.initialization`). It may also set
    `optimizer_settings` (see `depthlm.model.parameters`).

    is_compiled: whether torch.compile may compile `read` and `write` together with the sublayers beside them. They must
        then be short, without registered operators, and the same for all layers, on a stream of constant length.
    """

    is_compiled = False

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__()
        self.spec, self.size = spec, size

    @property
    def num_inputs(self) -> int:
        """The number of inputs that `read` returns: 1, or 3 for q, k and v of an attention, each with its own norm."""
        return 1

    def link(self, connections: "Sequence[Connection]") -> None:
        """Receive the connections whose parameters `read` may use, to read for several sublayers at once.

        The decoder passes all of its connections after it has created them. `Decoder.read_alone` passes only this
        connection.
        """

    def open(self, embedding_btd: Tensor) -> Stream:
        """Return the stream before the first sublayer."""
        return [embedding_btd]

    def read(self, stream: Stream) -> tuple[Inputs, Any]:
        """Return the inputs of this sublayer, x_btd each, and the carry. Every subclass must define it."""
        raise NotImplementedError(f"{type(self).__name__} defines no read(stream)")

    def linear_read(self, stream: Stream) -> tuple[Inputs, Any]:
        """Return what `read` returns, but with weights that are constants for autograd.

        Then the inputs are a linear function of all outputs of earlier sublayers, and its derivatives are the depth
        mixing matrix that `inspect` draws. A connection whose weights depend on the stream must define it.
        """
        return self.read(stream)

    def write(self, stream: Stream, output_btd: Tensor, carry: Any) -> Stream:
        """Return the stream after this sublayer. Every subclass must define it."""
        raise NotImplementedError(f"{type(self).__name__} defines no write(stream, output_btd, carry)")

    def materialize(self, stream: Stream) -> Stream:
        """Return the stream that the mechanism's formula defines before the read of this sublayer.

        The result contains no values that were read ahead for later sublayers, and pending writes are applied.
        """
        return stream

    def close(self, stream: Stream) -> Tensor:
        """Return the hidden state before the final norm. By default this is one more read."""
        return self.read(stream)[0][0]

    def forward_flops(self, length: float, causal: bool) -> float:
        """Return the FLOPs per token of this connection in one forward pass, without its `nn.Linear` children."""
        return 0.0

    def io_values(self) -> float:
        """Return the activation values read and written per token, beyond those of the residual connection."""
        return 0.0

    def diagnostics(self, stream: Stream) -> dict[str, Tensor]:
        """Return named tensors of any shape that describe the read of this stream.

        Each validation logs the largest value of each name over all tokens and sublayers.
        """
        return {}


class ConnectionFactory(Protocol):
    """A connection class whose own settings are bound with `functools.partial`."""

    def __call__(self, spec: SublayerSpec, size: Size, backbone: Backbone) -> Connection: ...
