"""Floating-point operations per token, from each module's formula.

A multiplication and an addition count as two. Matrix products and attention count; norms, activations, positions and
the lookup of an embedding do not, as in `torch.utils.flop_counter`, against which this is tested.
"""

from dataclasses import dataclass

from torch import nn

from depthlm.model.decoder import Decoder


@dataclass(frozen=True)
class Flops:
    """FLOPs per token. attention, mlp, head and connection are of one forward pass."""

    attention: float
    mlp: float
    head: float
    connection: float

    @property
    def forward(self) -> float:
        return self.attention + self.mlp + self.head + self.connection

    @property
    def training(self) -> float:
        """Forward and backward: three forwards (arXiv 2001.08361); recomputed layers do not count, as in MFU."""
        return 3 * self.forward


def flops_per_token(model: Decoder, sequence_length: int, causal: bool = True) -> Flops:
    """FLOPs per token of sequences of that length; works on the meta device.

    A linear layer of n weights: 2n. Attention: 4 H e T, halved if causal, where H is the heads, e their size and T the
    sequence. A mechanism adds its own through a method of its attention or connection, for what its `nn.Linear`
    children do not tell:

        def forward_flops(self, length, causal) -> float: ...

    causal: False counts the scores that the mask throws away too.
    """
    attention = mlp = 0.0
    for layer in model.layers:
        attention += _linear(layer.attention) + layer.attention.forward_flops(sequence_length, causal)
        mlp += _linear(layer.mlp)
    connection = sum(_linear(c) + c.forward_flops(sequence_length, causal) for c in model.connections)
    head = 2.0 * model.size.hidden_size * model.size.vocab_size
    return Flops(attention * model.loops, mlp * model.loops, head, connection)


def _linear(module: nn.Module) -> float:
    return sum(2.0 * m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))
