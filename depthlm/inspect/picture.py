"""What is collected while a decoder is shown tokens, and what comes of it: a picture and the arrays behind it."""

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
    """One PNG. about: what it shows, in a line. arrays: by their names in arrays.npz. draw: makes the figure."""

    name: str
    about: str
    arrays: dict[str, Array]
    draw: Callable[[], Any]


class Collector(Observer):
    """Collects what a mechanism does, as means over all tokens that the decoder is shown; `pictures` then draws it."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.depth = model.loops * model.size.num_layers
        self.sums: dict[Hashable, Array] = {}
        self.tokens: Counter[Hashable] = Counter()

    def add(self, name: Hashable, value: Tensor, tokens: int) -> None:
        """Count a value that is the mean over so many tokens."""
        self.sums[name] = self.sums.get(name, 0.0) + tokens * value.double().cpu().numpy()
        self.tokens[name] += tokens

    def mean(self, name: Hashable) -> Array:
        """The mean over all tokens."""
        return self.sums[name] / self.tokens[name]

    def pictures(self) -> list[Picture]:
        """What there is to see. Every collector defines it."""
        raise NotImplementedError


def over_tokens(weights: Tensor) -> Tensor:
    """The mean of [n, b, t, ...] over b and t; [n], which holds for all tokens, as it is."""
    return weights if weights.ndim == 1 else weights.mean((1, 2))


def stacked(rows: list[Array], width: int) -> Array:
    """Rows of different lengths as one array, nan behind their ends: [row, width]."""
    found = np.full((len(rows), width), np.nan)
    for number, row in enumerate(rows):
        found[number, : len(row)] = row
    return found
