"""Maps between streams, as of hyper-connections, their products over depth, and the gain of both."""

from functools import partial
from typing import Any

import numpy as np

from depthlm.inspect.figures import draw_curves, draw_matrices
from depthlm.inspect.picture import FigureOverDepth, Means, Picture, Place, spread
from depthlm.model.figures import Figure

# matrices per picture, from evenly spaced places
SHOWN = 6
SUBLAYERS = "sublayer (2l: attention, 2l + 1: MLP of layer l)"


class Matrices(FigureOverDepth):
    """A square matrix of each place, and the product of the matrices from each place to the last.

    The gain is that of the mHC paper (arXiv 2512.24880): the largest absolute row sum for the forward signal, and the
    largest absolute column sum for the backward gradient. It is computed per token and then averaged.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.means = Means()

    def add(self, figure: Figure, place: Place, tokens: int) -> None:
        pair = [number for number, axis in enumerate(figure.axes) if figure.axes.count(axis) > 1]
        self.maps[place] = np.moveaxis(figure.values.double().cpu().numpy(), pair, [-2, -1])

    def end_pass(self, tokens: int) -> None:
        """Add the products of one forward pass."""
        self.places = list(self.maps)
        product = np.eye(next(iter(self.maps.values())).shape[-1])
        for place, matrix in reversed(self.maps.items()):
            product = product @ matrix
            for part, values in (("", matrix), ("_composite", product)):
                over = tuple(range(values.ndim - 2))
                sums = [np.abs(values).sum(axis).max(-1).mean() for axis in (-1, -2)]
                self.means.add((part, place), values.mean(over), tokens)
                self.means.add((f"{part}_gain", place), np.stack(sums), tokens)

    def pictures(self) -> list[Picture]:
        parts = ("", "_composite", "_gain", "_composite_gain")
        arrays = {part: np.stack([self.means[part, place] for place in self.places]) for part in parts}
        last, shown, axis = (
            len(self.places) - 1,
            spread(len(self.places), SHOWN),
            max(self.figure.axes, key=self.figure.axes.count),
        )
        rows = [
            [(f"sublayer {number}", arrays[""][number]) for number in shown],
            [(f"{number} to {last}", arrays["_composite"][number]) for number in shown],
        ]
        title = f"{self.title}; below: the product from it to the last"
        sums = f"sums of columns (old {axis}s); at the left: of rows (new {axis}s)"
        labels = (f"{self.figure.name} of one sublayer", f"product of {self.figure.name} from a sublayer to the last")
        curves = {
            label: {"forward: row sum": row, "backward: column sum": column}
            for label, (row, column) in zip(labels, (arrays[part].T for part in parts[2:]), strict=True)
        }
        gains = partial(draw_curves, curves, f"{self.name}: gain", x=SUBLAYERS, y="largest absolute sum")
        drawn = (
            ("", f"{self.figure.about}, and their products up to the last", partial(draw_matrices, rows, title, sums)),
            ("_gain", "gain of one map, and of the product up to the last", gains),
        )
        return [
            Picture(f"{self.name}{end}", about, {f"{self.name}{part}": arrays[part] for part in pair}, draw)
            for (end, about, draw), pair in zip(drawn, (parts[:2], parts[2:]), strict=True)
        ]
