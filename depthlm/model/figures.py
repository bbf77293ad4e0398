"""What a mechanism lets `inspect` draw: arrays with the names of their axes."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Figure(NamedTuple):
    """An array that a connection or an attention returns for one place in depth, such as its weights over sources.

    name: the array and the picture are called <mechanism>_<name>, such as dca_weights.
    axes: the name of each axis. One axis has any name, such as "source" or "layer": its entries are the columns of a
        grid, whose rows are the places in depth. Without such an axis, the values are a curve over depth. Others may be
        - "batch" and "token", which are averaged over;
        - "panel", first: each entry has a grid or a curve of its own, with a title in `panels`;
        - "head", and last "hidden", which are averaged over in the picture.
        Two axes of one name, such as "stream", are a map, which is also multiplied over depth. The axes "head",
        "query", "key" are a map of attention; keys beyond the number of queries are entries of depth.
    about: the content of the picture in one line.
    columns: what the columns are; "": the name of the axis.
    panels: the titles of the panels.
    places: the column of each entry; (): 0, 1, ... An axis "layer" counts the layers with keys and values.
    after: whether it acts on the output of a sublayer, not on its input.
    """

    name: str
    values: Tensor
    axes: tuple[str, ...]
    about: str
    columns: str = ""
    panels: Sequence[str] = ()
    places: Sequence[int] = ()
    after: bool = False
