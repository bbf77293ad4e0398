"""Callbacks that inspect a forward pass."""

from torch import Tensor

from depthlm.model.attention.self_attention import AttentionContext, DepthKV, SelfAttention
from depthlm.model.connection import Connection, State
from depthlm.model.sublayer_spec import SublayerSpec


class Observer:
    """Receives the inputs and outputs of every sublayer of a decoder. By default each method does nothing.

    In a looped decoder, the layer of a SublayerSpec is the unrolled position. With activation checkpointing, the
    recomputation of a layer calls these methods again.
    """

    def open(self, embedding_btd: Tensor) -> None:
        """Called before the first connection opens the state."""

    def read(self, connection: Connection, state: State) -> None:
        """Called before a connection, including the final one, reads this state."""

    def attend(
        self,
        spec: SublayerSpec,
        attention: SelfAttention,
        projected: tuple[Tensor, ...],
        depth: DepthKV,
        past: AttentionContext,
    ) -> None:
        """Called before `SelfAttention.attend`, with its arguments."""

    def write(self, spec: SublayerSpec, output_btd: Tensor) -> None:
        """Called before a connection writes the output of its sublayer."""


UNOBSERVED = Observer()
