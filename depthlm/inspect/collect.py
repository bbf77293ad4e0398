"""The pictures of a mechanism, from the figures that its connections and attentions return in forward passes.

Figures over depth are grids of weights or curves, maps of streams, and maps of attention.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from depthlm.inspect.picture import (
    DISTRIBUTION,
    NOTHING,
    QUANTILES,
    TOKENS,
    Array,
    FigureOverDepth,
    Grid,
    Picture,
    Place,
    average_axes,
    draw_curves,
    draw_distributions,
    draw_grids,
    draw_matrices,
    spread,
    write_labels,
)
from depthlm.model import Decoder, Observer, SublayerSpec
from depthlm.model.attention import attention_positions
from depthlm.model.attention.context import AttentionContext
from depthlm.model.attention.self_attention import DepthKV, SelfAttention
from depthlm.model.connection import Connection, State
from depthlm.model.figures import Figure
from depthlm.runs.plots import subplots

# evenly spaced layers and heads, as in the paper of MoDA (arXiv 2603.15619)
LAYERS, HEADS = 4, 4
# the width of the depth entries and the gap before them, as fractions of the width of the sequence
WIDE, GAP = 0.35, 0.04
# matrices per picture, from evenly spaced places
SHOWN = 6
TITLES = {"attention": "before attention", "mlp": "before the MLP", "final": "final read", "": ""}
MEANS = {"token": "tokens", "head": "heads", "hidden": "the hidden size"}
SUBLAYERS = "sublayer (2l: attention, 2l + 1: MLP of layer l)"


@torch.no_grad()
def collect(model: Decoder, windows: Iterable[Tensor]) -> tuple[list[Picture], list[str]]:
    """Return the pictures of a decoder's mechanism over windows of tokens_bt, and a message if there are none."""
    collector = Collector(model)
    device = next(model.parameters()).device
    for tokens_bt in windows:
        model.hidden(tokens_bt.to(device), observer=collector)
    pictures = [picture for figure in collector.figures.values() for picture in figure.pictures()]
    return pictures, [] if pictures else ["this mechanism, with these settings, has no figure of its own"]


class Collector(Observer):
    """Collects the figures of all connections and attentions, by the mechanism's module and the figure's name."""

    def __init__(self, model: Decoder) -> None:
        self.depth = model.loops * model.size.num_layers
        self.attending = attention_positions([layer.attention for layer in model.layers], model.loops)
        self.figures: dict[tuple[str, str], FigureOverDepth] = {}

    def open(self, embedding_btd: Tensor) -> None:
        self.tokens = embedding_btd[..., 0].numel()

    def read(self, connection: Connection, state: State) -> None:
        spec = connection.spec
        for figure in figures_of(connection, state):
            self.add(connection, figure, Place(spec.kind, spec.layer))
        if spec.kind == "final":
            for over_depth in self.figures.values():
                if isinstance(over_depth, Matrices):
                    over_depth.end_pass(self.tokens)

    def attend(
        self,
        spec: SublayerSpec,
        attention: SelfAttention,
        projected: tuple[Tensor, ...],
        depth: DepthKV,
        context: AttentionContext,
    ) -> None:
        figures = getattr(attention, "figures", None)
        for figure in figures(projected, depth, context) if figures else []:
            self.add(attention, figure, Place("", spec.layer))

    def add(self, module: Connection | SelfAttention, figure: Figure, place: Place) -> None:
        mechanism = type(module).__module__.rpartition(".")[2]
        axes, shape = figure.axes, tuple(figure.values.shape)
        if len(axes) != len(shape):
            raise ValueError(f"{type(module).__qualname__}: figure {figure.name} of shape {shape} has axes {axes}")
        if "layer" in axes:
            places = figure.places or range(shape[axes.index("layer")])
            figure = figure._replace(places=[self.attending[position] for position in places])
        key = mechanism, figure.name
        if key not in self.figures:
            over_depth = AttentionMaps if "query" in axes else Matrices if len(set(axes)) < len(axes) else Grids
            self.figures[key] = over_depth(mechanism, figure, self.depth)
        self.figures[key].add(figure, place, self.tokens)


def figures_of(connection: Connection, state: State) -> Sequence[Figure]:
    """Return the figures of the read of this state: those that the class defines, or else its weights [n, b, t] or [n].

    A class whose weights have other axes, such as [b, t, d], defines its figures itself.
    """
    if (figures := getattr(connection, "figures", None)) is not None:
        return figures(state)
    weights = connection.weights(state)
    if not isinstance(weights, Tensor) or weights.ndim not in (1, 3):
        return []
    axes = ("source", "batch", "token") if weights.ndim == 3 else ("source",)
    return [Figure("weights", weights, axes, "what each sublayer reads")]


class AttentionMaps(FigureOverDepth):
    """Probabilities [head, query, key] of some layers and heads, of the first queries of the first window."""

    def add(self, figure: Figure, place: Place, tokens: int) -> None:
        if place in self.maps:
            return
        heads, t, _ = figure.values.shape
        self.heads = spread(heads, HEADS)
        shown = min(t, TOKENS)
        values = figure.values[self.heads, :shown].float().cpu().numpy()
        self.maps[place] = np.concatenate([values[..., :shown], values[..., t:]], axis=-1)

    def pictures(self) -> list[Picture]:
        places = [list(self.maps)[number] for number in spread(len(self.maps), LAYERS)]
        maps = {f"layer {place.layer}": self.maps[place] for place in places}
        arrays = {f"{self.name}_{place.layer}": self.maps[place] for place in places}
        draw = partial(draw_maps, maps, self.heads, self.title)
        return [Picture(self.name, self.figure.about, arrays, draw)]


def draw_maps(maps: Mapping[str, Array], heads: Sequence[int], title: str) -> Any:
    """Draw queries by [sequence | depth], separated by a dashed line: one column per layer, one row per head."""
    import matplotlib
    from matplotlib.colors import PowerNorm

    # the power makes small probabilities visible
    look = {
        "cmap": matplotlib.colormaps["viridis_r"].with_extremes(bad=NOTHING),
        "norm": PowerNorm(0.35, 0, 1),
        "aspect": "auto",
    }
    width, height = 2.9 * len(maps) + 1.1, 2.4 * len(heads) + 0.9
    figure, axes = subplots(len(maps), width, height, rows=len(heads))
    for column, (layer, values) in enumerate(maps.items()):
        axes[0, column].set_title(layer, fontsize="medium")
        for place, map_tx in zip(axes[:, column], values, strict=True):
            t, entries = len(map_tx), map_tx.shape[1] - len(map_tx)
            start, end = t * (1 + GAP), t * (1 + GAP + WIDE)
            sequence = np.where(np.triu(np.ones((t, t), dtype=bool), 1), np.nan, map_tx[:, :t])
            image = place.imshow(sequence, extent=(0, t, t, 0), **look)
            keys = {0.0: "0", float(t): "" if entries else str(t)}
            if entries:
                place.imshow(map_tx[:, t:], extent=(start, end, t, 0), **look)
                place.axvline(t * (1 + GAP / 2), color="red", ls="--", lw=1)
                keys[(start + end) / 2] = f"{entries} depth entries" if entries > 1 else "1 depth entry"
            place.set(xlim=(0, end), ylim=(t, 0))
            place.set_xticks(list(keys), list(keys.values()), size=8)
            place.set_yticks([0, t], ["0", str(t)], size=8)
            place.tick_params(length=2)
            place.spines[:].set_visible(False)
    for place, head in zip(axes[:, 0], heads, strict=True):
        place.set_ylabel(f"head {head}\nquery")
    write_labels(figure, title, "key: tokens, then depth entries")
    bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02, label="probability")
    bar.set_ticks([0, 0.01, 0.05, 0.2, 0.5, 1], labels=["0", "0.01", "0.05", "0.2", "0.5", "1"])
    return figure


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


class Grids(FigureOverDepth):
    """Weights of each place over columns, such as its sources; without columns, a curve over the layers.

    Arrays are [layer, ...] for the sublayers of each kind, and [...] for the final read, with all axes of the figure
    but batch and token. They are nan where a place has no such column.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.axes = [axis for axis in self.figure.axes if axis not in ("batch", "token")]
        self.column = next((axis for axis in self.axes if axis not in ("panel", "head", "hidden")), "")
        self.columns: dict[Place, list[int]] = {}
        self.panels: dict[str, Sequence[str]] = {}
        when = "after" if self.figure.after else "before"
        self.titles = {kind: title.replace("before", when) for kind, title in TITLES.items()}

    def add(self, figure: Figure, place: Place, tokens: int) -> None:
        values = figure.values.double().cpu().numpy()
        self.means.add(place, average_axes(values, figure.axes, ("batch", "token"))[0], tokens)
        self.panels[place.kind] = figure.panels
        if self.column:
            self.columns[place] = list(figure.places or range(values.shape[figure.axes.index(self.column)]))

    def pictures(self) -> list[Picture]:
        arrays = self.arrays()
        if not any(np.isfinite(values).any() for values in arrays.values()):
            return []
        named = {f"{self.name}{f'_{kind}' * (len(arrays) > 1)}": values for kind, values in arrays.items()}
        if "hidden" in self.axes:
            named |= {f"{name}_deviation": values.std(-1) for name, values in named.items()}
        means = [word for axis, word in MEANS.items() if axis in self.figure.axes]
        label = ", mean over ".join(filter(None, [self.figure.name.replace("_", " "), " and ".join(means)]))
        draw = (self.prepare_grids if self.column else self.prepare_curves)(arrays, label)
        return [Picture(self.name, self.figure.about, named, draw), *self.distribution(arrays)]

    def distribution(self, arrays: dict[str, Array]) -> list[Picture]:
        """Return the picture of how weights over sources are distributed over the hidden size, if they have one."""
        if self.column != "source" or self.axes[-1] != "hidden":
            return []
        name, over_depth = f"{self.name}_distribution", dict[str, Array]()
        places: dict[str, tuple[Array, Sequence[str]]] = {}
        for kind, array in arrays.items():
            # nan where there are no values
            values_q = over_depth[kind] = np.quantile(array, QUANTILES, axis=-1)
            names = self.panels[kind] or [self.figure.name]
            values = values_q if "panel" in self.axes else np.expand_dims(values_q, -2)
            of_kind = f": {self.titles[kind]}" * (len(arrays.keys() - {"final"}) > 1)
            of_layers = (
                [("final read", values)]
                if kind == "final"
                else [(f"layer {layer}{of_kind}", values[:, layer]) for layer in range(self.depth)]
            )
            places |= {title: (of_layer, names) for title, of_layer in of_layers if np.isfinite(of_layer).any()}
        columns, value = self.figure.columns or self.column, self.figure.name.replace("_", " ")
        draw = partial(draw_distributions, places, title=f"{self.title}; {DISTRIBUTION}", columns=columns, values=value)
        named = {f"{name}{f'_{kind}' * (len(arrays) > 1)}": values for kind, values in over_depth.items()}
        return [Picture(name, f"{self.figure.about}: their {DISTRIBUTION}", named, draw)]

    def arrays(self) -> dict[str, Array]:
        """Return the means of each kind, stacked over the layers."""
        width = 1 + max([column for columns in self.columns.values() for column in columns], default=0)
        width = max(width, self.depth if self.column == "layer" else 0)
        arrays: dict[str, Array] = {}
        for place in self.means.sums:
            values = self.means[place]
            if self.column:
                axis = self.axes.index(self.column)
                wide = np.full((width, *np.delete(values.shape, axis)), np.nan)
                wide[self.columns[place]] = np.moveaxis(values, axis, 0)
                values = np.moveaxis(wide, 0, axis)
            if place.kind == "final":
                arrays["final"] = values
            else:
                arrays.setdefault(place.kind, np.full((self.depth, *values.shape), np.nan))[place.layer] = values
        return {kind: arrays[kind] for kind in sorted(arrays, key=list(TITLES).index)}

    def by_panel(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Return [panel, layer, ...], and [panel, ...] of the final read, as means over heads and the hidden size."""
        if list(arrays) == ["final"]:
            arrays = {"": arrays["final"][None]}
        by_panel = {}
        for kind, values in arrays.items():
            mean, axes = average_axes(values, ["row"] * (kind != "final") + self.axes, ("head", "hidden"))
            by_panel[kind] = np.moveaxis(mean, axes.index("panel"), 0) if "panel" in axes else mean[None]
        return by_panel

    def prepare_grids(self, arrays: dict[str, Array], label: str) -> Callable[[], Any]:
        by_panel, grids = self.by_panel(arrays), list[Grid]()
        final = by_panel.pop("final", np.empty((0, 0)))
        for kind, values_plc in by_panel.items():
            for number, values in enumerate(values_plc):
                title, last = self.title_of(kind, number, len(by_panel) > 1), None
                if number < len(final) and kind == next(iter(by_panel)):
                    title, last = f"{title or self.titles[kind]}, and the final read", "final"
                    values = np.vstack([values, final[number]])
                if np.isfinite(values).any():
                    grids.append(Grid(title, values, last))
        columns = self.figure.columns or self.column
        return partial(draw_grids, grids, title=self.title, rows="layer", columns=columns, values=label)

    def prepare_curves(self, arrays: dict[str, Array], label: str) -> Callable[[], Any]:
        by_panel = self.by_panel(arrays)
        by_panel.pop("final", None)
        curves = {}
        for kind, values_pl in by_panel.items():
            titles = [self.title_of(kind, number, False) for number in range(len(values_pl))]
            curves[self.titles[kind] * (len(by_panel) > 1)] = dict(zip(titles, values_pl, strict=True))
        return partial(draw_curves, curves, title=self.title, x="layer", y=label)

    def title_of(self, kind: str, panel: int, with_kind: bool) -> str:
        panels = dict(enumerate(self.panels.get(kind, self.figure.panels)))
        title = panels.get(panel, str(panel) * ("panel" in self.axes))
        return ": ".join(filter(None, [self.titles[kind] * with_kind, title]))
