"""Base classes: a collector of values during forward passes, and a picture with its arrays."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from depthlm.model import Decoder, Observer

Array = NDArray[np.floating]
# the places in depth of which a picture shows the weights of single tokens
MAPS = 4


@dataclass(frozen=True)
class Picture:
    """One PNG. about: its content in one line. arrays: keyed by name in arrays.npz. draw: returns the figure."""

    name: str
    about: str
    arrays: dict[str, Array]
    draw: Callable[[], Any]


@dataclass(frozen=True)
class TokenMap:
    """Weights of the first tokens, [source, token]. name: of the array. sources: the label of each source."""

    name: str
    title: str
    values: Array
    sources: list[str]


class Collector(Observer):
    """Collects values of a mechanism as means over all tokens of the forward passes. `pictures` returns the result.

    token_names: the first tokens of the first window, where the pictures show single tokens. Otherwise it is empty.
    """

    token_names: Sequence[str] = ()

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.depth = model.loops * model.size.num_layers
        self.sums: dict[Hashable, Array] = {}
        self.tokens: Counter[Hashable] = Counter()
        self.token_maps: dict[str, TokenMap] = {}

    def add(self, name: Hashable, value: Tensor, tokens: int) -> None:
        """Add a value that is the mean over `tokens` tokens."""
        self.sums[name] = self.sums.get(name, 0.0) + tokens * value.double().cpu().numpy()
        self.tokens[name] += tokens

    def mean(self, name: Hashable) -> Array:
        """Return the mean over all tokens."""
        return self.sums[name] / self.tokens[name]

    def keep(self, name: str, title: str, weights_nt: Tensor, sources: Sequence[object]) -> None:
        """Keep the weights of the first window's tokens, [source, token], if the pictures show single tokens."""
        if self.token_names and name not in self.token_maps:
            values = weights_nt[:, : len(self.token_names)].double().cpu().numpy()
            self.token_maps[name] = TokenMap(name, title, values, [str(source) for source in sources])

    def spread_maps(self, *groups: str) -> list[list[TokenMap]]:
        """Return rows of the kept maps at MAPS evenly spaced places in depth, those of one source omitted.

        groups: the beginnings of the maps' names; a row has the maps of all groups at one place.
        """
        columns = [[one for one in self.token_maps.values() if one.name.startswith(group)] for group in groups]
        rows = [list(row) for row in zip(*columns, strict=True) if len(row[0].sources) > 1]
        return [rows[number] for number in spread(len(rows), MAPS)] if rows else []

    def pictures(self) -> list[Picture]:
        """Return the pictures. Every subclass must define it."""
        raise NotImplementedError


def spread(count: int, wanted: int) -> list[int]:
    """Return `wanted` evenly spaced numbers below `count`, including the first and the last one."""
    return sorted({round(number) for number in np.linspace(0, count - 1, wanted)})


def over_tokens(weights: Tensor) -> Tensor:
    """Return the mean of [n, b, t, ...] over b and t. Weights [n], the same for all tokens, are returned unchanged."""
    return weights if weights.ndim == 1 else weights.mean((1, 2))


def stacked(rows: list[Array], width: int) -> Array:
    """Return rows of different lengths as one array [row, width], padded with nan."""
    padded = np.full((len(rows), width), np.nan)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded
