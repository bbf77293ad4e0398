"""Base classes: a picture with its arrays, means over tokens, and a figure over the places in depth."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from depthlm.model.figures import Figure

Array = NDArray[np.floating]


class Picture(NamedTuple):
    """One PNG. about: its content in one line. arrays: keyed by name in arrays.npz. draw: returns the figure."""

    name: str
    about: str
    arrays: dict[str, Array]
    draw: Callable[[], Any]


class Place(NamedTuple):
    """Where in depth. kind: of the sublayer of a connection, or final; "" for an attention. layer: unrolled."""

    kind: str
    layer: int

    @property
    def suffix(self) -> str:
        """The end of the name of an array of this place alone."""
        return "_final" if self.kind == "final" else f"{self.kind and '_'}{self.kind}_{self.layer}"


class Means:
    """Means over the tokens of several forward passes, by key."""

    def __init__(self) -> None:
        self.sums: dict[Any, Array] = {}
        self.tokens: Counter[Hashable] = Counter()

    def add(self, key: Hashable, mean: Array, tokens: int) -> None:
        """Add the mean over `tokens` tokens."""
        self.sums[key] = self.sums.get(key, 0.0) + tokens * mean
        self.tokens[key] += tokens

    def __getitem__(self, key: Hashable) -> Array:
        return self.sums[key] / self.tokens[key]


class FigureOverDepth:
    """A figure of a mechanism: collects its values at all places in depth, and draws them.

    name: of its arrays and pictures. figure: the first one, which has the axes and labels of all. depth: the number of
    unrolled layers. token_names: the first tokens of the first window, where the pictures show single tokens. means,
    maps: what it keeps of the places.
    """

    def __init__(self, mechanism: str, figure: Figure, depth: int, token_names: Sequence[str]) -> None:
        self.name = f"{mechanism}_{figure.name}"
        self.figure = figure
        self.depth = depth
        self.token_names = token_names
        self.title = f"{mechanism}: {figure.about}"
        self.means = Means()
        self.maps = dict[Place, Array]()

    def add(self, figure: Figure, place: Place, tokens: int) -> None:
        """Add the values of one place in a forward pass over `tokens` tokens."""
        raise NotImplementedError

    def pictures(self) -> list[Picture]:
        """Return the pictures; empty if there is nothing to draw."""
        raise NotImplementedError


def averaged(values: Array, axes: Sequence[str], over: Sequence[str]) -> tuple[Array, list[str]]:
    """Return the mean over the axes named in `over`, and the names of the other axes."""
    away = tuple(number for number, axis in enumerate(axes) if axis in over)
    return values.mean(away), [axis for axis in axes if axis not in over]


def spread(count: int, wanted: int) -> list[int]:
    """Return `wanted` evenly spaced numbers below `count`, including the first and the last one."""
    return sorted({round(number) for number in np.linspace(0, count - 1, wanted)})
