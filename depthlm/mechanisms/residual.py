"""The residual connection (arXiv 1512.03385), vanilla's: h <- h + f(h).

h_btd --+-----------------(+)-> h_btd
        `-> sublayer f ----'
"""

from torch import Tensor

from depthlm.model.connection import Connection, Hidden, Inputs


class Residual(Connection):
    """The residual connection of a standard decoder."""

    colour = "#4D4D4D"
    is_compiled = True
    identity_start = ""
    accumulates = "sum"

    def read(self, state: Hidden, weights: None = None) -> tuple[Inputs, None]:
        return (state.h,), None

    def write(self, state: Hidden, output_btd: Tensor, carry: None) -> Hidden:
        return Hidden(state.h + output_btd)
