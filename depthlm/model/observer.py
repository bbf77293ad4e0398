"""How one looks into a forward pass."""

from torch import Tensor

from depthlm.model.attention.self_attention import AttentionContext, DepthKV, SelfAttention
from depthlm.model.connections.connection import Connection, Stream
from depthlm.model.sublayer_spec import SublayerSpec


class Observer:
    """Is shown what every sublayer of a decoder works on. Each method does nothing; a subclass says what it looks at.

    In a looped decoder the layer of a place is the unrolled position. Where a backward pass recomputes a layer, its
    sublayers are shown again.
    """

    def read(self, connection: Connection, stream: Stream) -> None:
        """A connection, also the final one, is about to read this stream.

        `connection.materialize(stream)` is what of it the mechanism's formula has.
        """

    def attend(
        self,
        spec: SublayerSpec,
        attention: SelfAttention,
        projected: tuple[Tensor, ...],
        depth: DepthKV,
        past: AttentionContext,
    ) -> None:
        """An attention is about to attend, with these arguments of `SelfAttention.attend`."""

    def write(self, spec: SublayerSpec, output_btd: Tensor) -> None:
        """A connection is about to write this output of its sublayer."""


UNOBSERVED = Observer()
