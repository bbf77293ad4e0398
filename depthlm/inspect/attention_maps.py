"""Maps of an attention over [sequence | depth], of the first window."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from depthlm.inspect.figures import NOTHING, write_title
from depthlm.inspect.picture import Array, FigureOverDepth, Picture, Place, spread
from depthlm.inspect.tokens import TOKENS, named_tokens, side
from depthlm.model.figures import Figure
from depthlm.report.figures.style import subplots

# evenly spaced layers and heads, as in the paper of MoDA (arXiv 2603.15619)
LAYERS, HEADS = 4, 4
# the width of the depth entries and the gap before them, as fractions of the width of the sequence
WIDE, GAP = 0.35, 0.04
# the inches of the name of a token
PITCH = 0.085


class AttentionMaps(FigureOverDepth):
    """Probabilities [head, query, key] of some layers and heads, of the first queries of the first window."""

    def __init__(self, mechanism: str, figure: Figure, depth: int, token_names: Sequence[str]) -> None:
        super().__init__(mechanism, figure, depth, token_names)
        self.maps: dict[Place, Array] = {}

    def add(self, figure: Figure, place: Place, tokens: int) -> None:
        if place in self.maps:
            return
        heads, t, _ = figure.values.shape
        self.heads, shown = spread(heads, HEADS), min(t, TOKENS)
        values = figure.values[self.heads, :shown].float().cpu().numpy()
        self.maps[place] = np.concatenate([values[..., :shown], values[..., t:]], axis=-1)

    def pictures(self) -> list[Picture]:
        places = [list(self.maps)[number] for number in spread(len(self.maps), LAYERS)]
        maps = {f"layer {place.layer}": self.maps[place] for place in places}
        arrays = {f"{self.name}{place.suffix}": self.maps[place] for place in places}
        draw = partial(draw_maps, maps, self.heads, self.token_names, self.title)
        return [Picture(self.name, self.figure.about, arrays, draw)]


def draw_maps(maps: Mapping[str, Array], heads: Sequence[int], names: Sequence[str], title: str) -> Any:
    """Draw queries by [sequence | depth], separated by a dashed line: one column per layer, one row per head.

    names: of the tokens; without names, the first and the last position are numbered.
    """
    import matplotlib
    from matplotlib.colors import PowerNorm

    wide, high = (side(len(names), least, PITCH) for least in (2.5, 2.0))
    figure, axes = subplots(
        len(maps),
        (wide * (1 + GAP + WIDE if names else 1) + 0.4) * len(maps) + 1.1,
        (high + 0.4) * len(heads) + 0.9,
        rows=len(heads),
    )
    colours = matplotlib.colormaps["viridis_r"].with_extremes(bad=NOTHING)
    # makes small probabilities visible
    norm = PowerNorm(0.35, 0, 1)
    for column, (layer, values) in enumerate(maps.items()):
        for row, head in enumerate(heads):
            place, map_tx = axes[row, column], values[row]
            t, entries = len(map_tx), map_tx.shape[1] - len(map_tx)
            hidden = np.triu(np.ones((t, t), dtype=bool), 1)
            sequence = np.where(hidden, np.nan, map_tx[:, :t])
            image = place.imshow(sequence, cmap=colours, norm=norm, extent=(0, t, t, 0), aspect="auto")
            start, end = t * (1 + GAP), t * (1 + GAP + WIDE)
            ticks = {0.0: "0", float(t): str(t)}
            if entries:
                place.imshow(map_tx[:, t:], cmap=colours, norm=norm, extent=(start, end, t, 0), aspect="auto")
                place.axvline(t * (1 + GAP / 2), color="red", ls="--", lw=1)
                ticks = {0.0: "0", (start + end) / 2: f"{entries} depth entries" if entries > 1 else "1 depth entry"}
            place.set_xlim(0, end)
            place.set_ylim(t, 0)
            if names:
                _name_tokens(place, ticks, names, column == 0, row == len(heads) - 1)
            else:
                place.set_xticks(list(ticks), list(ticks.values()), size=8)
                place.set_yticks([0, t], ["0", str(t)], size=8)
            place.tick_params(length=2)
            place.spines[:].set_visible(False)
            if row == 0:
                place.set_title(layer, fontsize="medium")
            if column == 0:
                place.set_ylabel(f"head {head}\nquery")
    write_title(figure, title)
    figure.supxlabel("key: tokens, then depth entries", fontsize="medium")
    bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02, label="probability")
    bar.set_ticks([0, 0.01, 0.05, 0.2, 0.5, 1], labels=["0", "0.01", "0.05", "0.2", "0.5", "1"])
    return figure


def _name_tokens(place: Any, ticks: Mapping[float, str], names: Sequence[str], leftmost: bool, lowest: bool) -> None:
    """Label the queries of the leftmost panels, and the keys of the lowest ones, with the names of their tokens."""
    shown = named_tokens(len(names))
    places, texts = [token + 0.5 for token in shown], [names[token] for token in shown]
    # the label of the depth entries
    beyond = {tick: text for tick, text in ticks.items() if tick > len(names)}
    place.set_yticks(places, texts if leftmost else [], size=6)
    place.set_xticks([*places, *beyond], [*texts, *beyond.values()] if lowest else [], size=6, rotation=90)
