"""Maps between streams, as of hyper-connections, their products over depth, and the gain of both."""

from functools import partial

import numpy as np

from depthlm.inspect.figures import draw_curves, draw_matrices
from depthlm.inspect.picture import FigureOverDepth, Picture, Place, spread
from depthlm.model.figures import Figure

# matrices per picture, from evenly spaced places
SHOWN = 6
SUBLAYERS = "sublayer (2l: attention, 2l + 1: MLP of layer l)"


class Matrices(FigureOverDepth):
    """A square matrix of each place, and the product of the matrices from each place to the last.

    The gain is that of the mHC paper (arXiv 2512.24880): the largest absolute row sum for the forward signal, and the
    largest absolute column sum for the backward gradient. It is computed per token and then averaged.
    """

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
                sums = [np.abs(values).sum(axis).max(-1).mean() for axis in (-1, -2)]
                self.means.add((part, place), values.mean(tuple(range(values.ndim - 2))), tokens)
                self.means.add((f"{part}_gain", place), np.stack(sums), tokens)

    def pictures(self) -> list[Picture]:
        parts = ("", "_composite", "_gain", "_composite_gain")
        arrays = {part: np.stack([self.means[part, place] for place in self.places]) for part in parts}
        last, shown = len(self.places) - 1, spread(len(self.places), SHOWN)
        axis = max(self.figure.axes, key=self.figure.axes.count)
        rows = [
            [(f"sublayer {number}", arrays[""][number]) for number in shown],
            [(f"{number} to {last}", arrays["_composite"][number]) for number in shown],
        ]
        title = f"{self.title}; below: the product from it to the last"
        sums = f"sums of columns (old {axis}s); at the left: of rows (new {axis}s)"
        name, products = self.figure.name, f"{self.figure.about}, and their products up to the last"
        gains = {
            f"{name} of one sublayer": arrays["_gain"],
            f"product of {name} up to the last": arrays["_composite_gain"],
        }
        curves = {
            label: {"forward: row sum": gain[:, 0], "backward: column sum": gain[:, 1]} for label, gain in gains.items()
        }
        draw = partial(draw_curves, curves, f"{self.name}: gain", x=SUBLAYERS, y="largest absolute sum")
        named = [{f"{self.name}{part}": arrays[part] for part in pair} for pair in (parts[:2], parts[2:])]
        return [
            Picture(self.name, products, named[0], partial(draw_matrices, rows, title, sums)),
            Picture(f"{self.name}_gain", "gain of each map, and of the product up to the last", named[1], draw),
        ]
