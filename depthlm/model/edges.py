"""Edges over depth: the weight with which a read takes each of its sources, and changes of these weights.

Before it uses them, a mechanism passes the weights of a read to `edited` of its connection or attention. There an edit
may change them, such as an intervention of `inspect`. The other reads are not affected.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Reader(NamedTuple):
    """Who reads. kind: attention, mlp or final, for the read of a connection; layer: for an attention that reads keys
    and values of earlier layers. layer: unrolled.
    """

    kind: str
    layer: int

    @property
    def name(self) -> str:
        """The name in files."""
        return self.kind if self.kind == "final" else f"{self.kind}_{self.layer}"


class Edges(NamedTuple):
    """What the weights of a read are.

    axes: the name of each axis, as in `Figure`: always "batch" and "token", and "source", or twice "stream" for the map
        from old to new streams; perhaps "panel" for the inputs of q, k and v, and "head" or "hidden".
    sources: the number of each source, which is the same for all readers; -1: no edge, but a part of the sum.
    normalized: whether the weights of a read sum to 1.
    """

    axes: tuple[str, ...]
    sources: tuple[int, ...]
    normalized: bool

    @property
    def maps_streams(self) -> bool:
        """Whether the weights map streams to streams."""
        return "stream" in self.axes


# returns the weights that a read uses
Edit = Callable[[Reader, Tensor, Edges], Tensor]


def describe_axes(
    weights: Tensor, axes: tuple[str, ...], sources: Sequence[int] = (), normalized: bool = False
) -> Edges:
    """Describe the axes of a weight tensor. sources: (): 0, 1, ..."""
    if not sources:
        sources = range(weights.shape[axes.index("source")] if "source" in axes else 1)
    return Edges(axes, tuple(sources), normalized)


def per_token(weights: Tensor, x_bt: Tensor) -> Tensor:
    """Return weights[n] of all tokens as [n, b, t, ...], one for each position of x_bt..."""
    shape = x_bt.shape[:2]
    return weights.view(-1, *[1] * len(shape)).expand(-1, *shape)


def replace_weights(weights: Tensor, edges: Edges, kept: Tensor, other: Tensor | None = None) -> Tensor:
    """Return the weights where `kept` is true, and `other` elsewhere.

    kept: broadcasts to the weights. other: likewise; None: 0, with the remaining weights renormalized to their earlier
        sum where that is 1 by definition. If nothing remains, the read is 0. A map of streams is the identity.
    """
    if other is not None:
        return torch.where(kept, weights, other)
    if edges.maps_streams:
        return torch.where(kept, weights, torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device))
    remaining = torch.where(kept, weights, 0)
    if not edges.normalized:
        return remaining
    axis = edges.axes.index("source")
    before, after = weights.sum(axis, keepdim=True), remaining.sum(axis, keepdim=True)
    return remaining * torch.where(after > 0, before / after, 0)


def align_axes(x: Tensor, names: Sequence[str], axes: Sequence[str]) -> Tensor:
    """Return x, whose axes have these names, as it broadcasts to `axes`. An axis that these lack has one entry."""
    lacking = tuple(number for number, name in enumerate(names) if name not in axes)
    names = [name for name in names if name in axes]
    x = x.squeeze(lacking).permute([names.index(axis) for axis in dict.fromkeys(axes) if axis in names])
    return x[tuple(slice(None) if axis in names else None for axis in axes)]
