"""The residual connection (arXiv 1512.03385): h <- h + f(h)."""

from torch import Tensor

from depthlm.model.connections.connection import Connection, Inputs, Stream


class Residual(Connection):
    """The residual connection of a standard decoder. The stream is one tensor.

    h_btd --+-----------------(+)-> h_btd
            `-> sublayer f ----'
    """

    is_compiled = True

    def read(self, stream: Stream) -> tuple[Inputs, None]:
        return (stream[0],), None

    def write(self, stream: Stream, output_btd: Tensor, carry: None) -> Stream:
        return [stream[0] + output_btd]
