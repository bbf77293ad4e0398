"""Drawing functions for the attention of MoDA."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from depthlm.inspect.figures import HUES, NOTHING, Grid, draw_grid, scale
from depthlm.inspect.picture import Array
from depthlm.inspect.tokens import named_tokens, side
from depthlm.report.figures.style import grid, subplots

# the width of the depth entries and the gap before them, as fractions of the width of the sequence
WIDE, GAP = 0.35, 0.04
# the inches of the name of a token
PITCH = 0.085


def draw_maps(
    maps: Mapping[int, Array],
    entries: Mapping[int, Sequence[tuple[int, str]]],
    heads: Sequence[int],
    names: Sequence[str] = (),
) -> Any:
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
            t = len(map_tx)
            hidden = np.triu(np.ones((t, t), dtype=bool), 1)
            sequence = np.where(hidden, np.nan, map_tx[:, :t])
            image = place.imshow(sequence, cmap=colours, norm=norm, extent=(0, t, t, 0), aspect="auto")
            start, end = t * (1 + GAP), t * (1 + GAP + WIDE)
            ticks = {0.0: "0", float(t): str(t)}
            if entries[layer]:
                place.imshow(map_tx[:, t:], cmap=colours, norm=norm, extent=(start, end, t, 0), aspect="auto")
                place.axvline(t * (1 + GAP / 2), color="red", ls="--", lw=1)
                ticks = {0.0: "0", (start + end) / 2: _depth_label(entries[layer])}
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
                place.set_title(f"layer {layer}", fontsize="medium")
            if column == 0:
                place.set_ylabel(f"head {head}\nquery")
    figure.suptitle("MoDA: attention over [sequence | depth] of the first window", fontsize="medium")
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


def draw_depth_share(share: Array) -> Any:
    """Draw share [layer, source layer, attention or MLP entry]: its sums as bars, and each entry as a cell."""
    kinds = [
        (number, name) for number, name in enumerate(("attention", "MLP")) if np.isfinite(share[..., number]).any()
    ]
    depth = len(share)
    side = 1.2 + max(2.4, depth * np.clip(5.0 / depth, 0.105, 0.4))
    figure, axes = subplots(1 + len(kinds), side * (1 + len(kinds)) + 0.9, side)
    bars, *cells = axes[0]
    below = np.zeros(depth)
    for number, name in kinds:
        part = np.nansum(share[..., number], axis=1)
        bars.bar(range(depth), part, 0.8, below, color=HUES[number], label=f"{name} entries")
        below += part
    bars.set(xlabel="layer", ylabel="share of the attention that goes to depth", ylim=(0, 1))
    bars.xaxis.get_major_locator().set_params(integer=True)
    grid(bars, "y")
    if kinds:
        bars.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
        norm, colours = scale([share])
    for place, (number, name) in zip(cells, kinds, strict=True):
        image = draw_grid(place, Grid(f"to {name} entries", share[..., number]), norm, colours)
        place.set(xlabel="layer of the entry", ylabel="layer of the query")
    if kinds:
        figure.colorbar(image, ax=cells, shrink=0.85, pad=0.02, label="mean probability")
    figure.suptitle("MoDA: attention to depth; the rest goes to the sequence", fontsize="medium")
    return figure


def _depth_label(entries: Sequence[tuple[int, str]]) -> str:
    lowest, highest = entries[0][0], entries[-1][0]
    return f"depth: layer {lowest}" if lowest == highest else f"depth: {lowest} to {highest}"
