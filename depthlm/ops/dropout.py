"""Dropout whose masks are a function of one seed per sequence.

So they do not depend on the number of ranks, the micro-batch or the device, nor on whether activations are recomputed.

Shapes: b batch; the other dimensions of a tensor are arbitrary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# of the hash lowbias32 (Wellons, https://nullprogram.com/blog/2018/07/31), as signed integers
MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)
# 2^32 over the golden ratio, as a signed integer, which keeps successive numbers far apart
GOLDEN = 0x9E3779B9 - 2**32
# the places of a layer that have dropout, and so different masks
ATTENTION_WEIGHTS, HIDDEN, ATTENTION_OUTPUT, MLP_OUTPUT = range(4)


class Dropout(NamedTuple):
    """Dropout of the values of a micro-batch. rate: probability of zero. seeds_b: int32, one per sequence."""

    rate: float
    seeds_b: Tensor

    def at(self, number: int) -> "Dropout":
        """Return the same with the seeds of one of several places, from 0."""
        return Dropout(self.rate, hash_bits(self.seeds_b + ((number + 1) * GOLDEN + 2**31) % 2**32 - 2**31))


def apply_dropout(x: Tensor, dropout: Dropout | None, place: int) -> Tensor:
    """Return x with values set to zero at random, and the others divided by 1 - rate (arXiv 1207.0580). None: return x.

    x: [b, ...]. place: number of this use among those with the same seeds.
    """
    if dropout is None:
        return x
    return torch.where(draw_mask(x.shape, dropout.at(place)), x, 0) / (1 - dropout.rate)


def draw_mask(shape: torch.Size, dropout: Dropout) -> Tensor:
    """Return a mask of a shape [b, ...], true with probability 1 - rate."""
    index = torch.arange(shape[1:].numel(), dtype=torch.int32, device=dropout.seeds_b.device).view(1, *shape[1:])
    seeds = dropout.seeds_b.view(-1, *[1] * (len(shape) - 1))
    return hash_bits(hash_bits(index) ^ seeds) >= round(dropout.rate * 2**32) - 2**31


def hash_bits(x: Tensor) -> Tensor:
    """Return a permutation of all 32-bit integers that looks random; overflow wraps around."""
    x = (x ^ _shift(x, 16)) * MULTIPLIERS[0]
    x = (x ^ _shift(x, 15)) * MULTIPLIERS[1]
    return x ^ _shift(x, 16)


def _shift(x: Tensor, bits: int) -> Tensor:
    # >> copies the sign bit
    return (x >> bits) & (2 ** (32 - bits) - 1)
