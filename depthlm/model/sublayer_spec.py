"""Where a piece of a decoder stands: how a mechanism knows what it is without counting calls."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SublayerSpec:
    """The place of a connection or an attention.

    layer: index from 0. Of a connection in a looped decoder: its unrolled position, as each loop has its own
        connections; an attention is shared by the loops.
    kind: "attention" or "mlp" for a sublayer, "final" for the read before the final norm (its layer is num_layers).
    num_layers: how many layers there are, counted as `layer` is.
    loops: passes through the layers; only an attention needs it.
    """

    layer: int
    kind: str
    num_layers: int
    loops: int = 1

    @property
    def sublayer(self) -> int:
        """Index of the sublayer, 0 to 2 * num_layers - 1; 2 * num_layers for the final read."""
        return 2 * self.layer + (self.kind == "mlp")
