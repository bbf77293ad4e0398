"""The place of a sublayer in a decoder."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SublayerSpec:
    """The place of a connection or an attention in a decoder.

    layer: index from 0. For a connection of a looped decoder this is the unrolled position, since each loop has its own
        connections. The loops share their attentions. For an attention it counts the layers with keys and values.
    kind: "attention" or "mlp" for a sublayer, "final" for the read before the final norm (its layer is num_layers).
    num_layers: the number of layers, counted like `layer`.
    loops: the number of passes through the layers. Only an attention needs it.
    mixer: attention or latent, as in `Backbone.mixers`. Only an attention needs it.
    """

    layer: int
    kind: str
    num_layers: int
    loops: int = 1
    mixer: str = "attention"

    @property
    def sublayer(self) -> int:
        """Index of the sublayer, 0 to 2 * num_layers - 1; 2 * num_layers for the final read."""
        return 2 * self.layer + (self.kind == "mlp")
