"""Base classes: a collector of values during forward passes, and a picture with its arrays."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from depthlm.model import Decoder, Observer

Array = NDArray[np.floating]


@dataclass(frozen=True)
class Picture:
    """One PNG. about: its content in one line. arrays: keyed by name in arrays.npz. draw: returns the figure."""

    name: str
    about: str
    arrays: dict[str, Array]
    draw: Callable[[], Any]


class Collector(Observer):
    """Collects values of a mechanism as means over all tokens of the forward passes. `pictures` returns the result."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.depth = model.loops * model.size.num_layers
        self.sums: dict[Hashable, Array] = {}
        self.tokens: Counter[Hashable] = Counter()

    def add(self, name: Hashable, value: Tensor, tokens: int) -> None:
        """Add a value that is the mean over `tokens` tokens."""
        self.sums[name] = self.sums.get(name, 0.0) + tokens * value.double().cpu().numpy()
        self.tokens[name] += tokens

    def mean(self, name: Hashable) -> Array:
        """Return the mean over all tokens."""
        return self.sums[name] / self.tokens[name]

    def pictures(self) -> list[Picture]:
        """Return the pictures. Every subclass must define it."""
        raise NotImplementedError


def over_tokens(weights: Tensor) -> Tensor:
    """Return the mean of [n, b, t, ...] over b and t. Weights [n], the same for all tokens, are returned unchanged."""
    return weights if weights.ndim == 1 else weights.mean((1, 2))


def stacked(rows: list[Array], width: int) -> Array:
    """Return rows of different lengths as one array [row, width], padded with nan."""
    padded = np.full((len(rows), width), np.nan)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded
