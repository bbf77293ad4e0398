"""Maps of an attention over [sequence | depth], of the first window."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from depthlm.inspect.figures import NOTHING, TOKENS, named_tokens, side, write_labels
from depthlm.inspect.picture import Array, FigureOverDepth, Picture, Place, spread
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
    width = (wide * (1 + GAP + WIDE if names else 1) + 0.4) * len(maps) + 1.1
    figure, axes = subplots(len(maps), width, (high + 0.4) * len(heads) + 0.9, rows=len(heads))
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
            queries = {token + 0.5: names[token] for token in named_tokens(len(names))} or {0.0: "0", float(t): str(t)}
            keys = queries if names or not entries else {0.0: "0"}
            if entries:
                place.imshow(map_tx[:, t:], cmap=colours, norm=norm, extent=(start, end, t, 0), aspect="auto")
                place.axvline(t * (1 + GAP / 2), color="red", ls="--", lw=1)
                keys = keys | {(start + end) / 2: f"{entries} depth entries" if entries > 1 else "1 depth entry"}
            place.set_xlim(0, end)
            place.set_ylim(t, 0)
            lowest, leftmost, size = row == len(heads) - 1, column == 0, 6 if names else 8
            labels = list(keys.values()) if lowest or not names else []
            place.set_xticks(list(keys), labels, size=size, rotation=90 if names else 0)
            place.set_yticks(list(queries), list(queries.values()) if leftmost or not names else [], size=size)
            place.tick_params(length=2)
            place.spines[:].set_visible(False)
            if row == 0:
                place.set_title(layer, fontsize="medium")
            if column == 0:
                place.set_ylabel(f"head {head}\nquery")
    write_labels(figure, title, "key: tokens, then depth entries")
    bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02, label="probability")
    bar.set_ticks([0, 0.01, 0.05, 0.2, 0.5, 1], labels=["0", "0.01", "0.05", "0.2", "0.5", "1"])
    return figure
