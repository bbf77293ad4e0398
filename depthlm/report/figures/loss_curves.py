"""The training losses of many runs in one figure: a panel per task, and a curve per row."""

from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from depthlm.counts import count_text
from depthlm.report.figures.end_labels import LINE, End, label_ends, width_of
from depthlm.report.figures.panels import LossCurve, Panel
from depthlm.report.figures.style import Style, grid, save, short, style_of, subplots
from depthlm.report.mechanism import Mechanism
from depthlm.runs.records import COMPLETE, RunRecord, training_loss
from depthlm.runs.validation_losses import finite

# SMOOTHED: the share of a run's logged steps in the running mean. START: the share of a panel's longest run whose
# losses may exceed the y axis, so that differences at the end can be seen.
SMOOTHED, START = 0.04, 0.3
# the fewest logged steps of a run that is smoothed
SMOOTHABLE = 24
# with more curves in a panel, only one of each mechanism is named
MOST_NAMED = 24
ACROSS = 3


def draw_loss_curves(panels: Sequence[Panel], path: Path, stamp: str) -> list[str] | None:
    """Draw training losses over tokens, smoothed; None where no run has any. Returns the notes on the figure."""
    panels = [panel for panel in panels if any(_has_losses(run) for curve in panel.curves for run in curve.runs)]
    if not panels:
        return None
    across = 2 if len(panels) == 4 else min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    names = min(MOST_NAMED, max(len(panel.curves) for panel in panels))
    inner = max(2.6 if len(panels) > 1 else 3.6, names * LINE / 72)
    wide = width_of([_name(curve) for panel in panels for curve in panel.curves])
    width = ((6.5 if across == 1 else 3.7) + wide) * across
    figure, axes = subplots(across, width, (inner + 0.9) * down, rows=down)
    for place, panel in zip(axes.flat, panels, strict=False):
        _draw(place, panel, inner)
    for place in axes.flat[len(panels) :]:
        place.set_visible(False)
    for place in axes[:, 0]:
        place.set_ylabel("training loss (nats per token)")
    save(figure, path, stamp)
    return _notes(panels)


def _notes(panels: Sequence[Panel]) -> list[str]:
    curves = [curve for panel in panels for curve in panel.curves]
    notes = [f"Training losses, as a running mean over about {SMOOTHED:.0%} of a run's logged steps."]
    if any(len(curve.runs) > 1 for curve in curves):
        notes.append("Thin lines: single seeds; thick lines: the mean over the complete ones.")
    if any(run.state != COMPLETE and _has_losses(run) for curve in curves for run in curve.runs):
        notes.append("Pale lines that end in a cross are incomplete runs.")
    crowded = max(len(panel.curves) for panel in panels)
    if crowded > MOST_NAMED:
        notes.append(f"{crowded} curves in a panel are too many to name individually: one of each mechanism is named.")
    return notes


def _has_losses(run: RunRecord) -> bool:
    return bool(np.isfinite(read(run)[1]).any())


def read(run: RunRecord) -> tuple[Any, Any]:
    """Return the tokens and the training loss of a run's logged steps, with nan for gaps."""
    rows = [row for row in run.rows if finite(row.get("tokens")) is not None]
    losses = [training_loss(row) for row in rows]
    tokens = np.array([row["tokens"] for row in rows], float)
    return tokens, np.array([np.nan if loss is None else loss for loss in losses], float)


def smooth(loss: Any) -> Any:
    """Return the centred mean over a share SMOOTHED of the rows, over fewer at the ends; gaps remain gaps."""
    # at least one neighbour on each side, except in the shortest runs
    width = max(int(SMOOTHED * len(loss)) // 2, int(len(loss) >= SMOOTHABLE))
    if width == 0:
        return loss
    valid = np.isfinite(loss)
    window = np.ones(2 * width + 1)
    total = np.convolve(np.where(valid, loss, 0.0), window, "same")
    count = np.convolve(valid.astype(float), window, "same")
    return np.where(valid, total / np.maximum(count, 1), np.nan)


def mean_curve(curves: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the mean of curves (tokens, loss) at the tokens that all of them have; a gap in one is a gap."""
    tokens = reduce(np.intersect1d, [own_tokens for own_tokens, _ in curves])
    every = [dict(zip(own_tokens, own_loss, strict=True)) for own_tokens, own_loss in curves]
    return tokens, np.array([np.mean([losses[at] for losses in every]) for at in tokens], float)


def _draw(axes: Any, panel: Panel, height: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    drawn: list[tuple[Any, Any]] = []
    ends: dict[Mechanism, list[End]] = {}
    for curve, style in zip(panel.curves, style_of([curve.mechanism for curve in panel.curves]), strict=True):
        smoothed = [(tokens, smooth(loss)) for tokens, loss in map(read, curve.runs)]
        pairs = [(run, one) for run, one in zip(curve.runs, smoothed, strict=True) if np.isfinite(one[1]).any()]
        if not pairs:
            continue
        lines = _draw_curve(axes, curve, pairs, style)
        drawn += lines
        ends.setdefault(curve.mechanism, []).append(_end(_name(curve), style, lines[-1]))
    every = [end for of_mechanism in ends.values() for end in of_mechanism]
    if len(every) > MOST_NAMED:
        every = [
            End(short(mechanism.name), best.colour, best.x, best.y)
            for mechanism, of_mechanism in ends.items()
            for best in [min(of_mechanism, key=lambda end: end.y)]
        ]
    _limit(axes, drawn)
    label_ends(axes, every, height)
    axes.set_title(short(panel.title, 60), fontsize="medium")
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
    grid(axes)


def _draw_curve(
    axes: Any, curve: LossCurve, pairs: Sequence[tuple[RunRecord, tuple[Any, Any]]], style: Style
) -> list[tuple[Any, Any]]:
    """Draw each run, and the mean of the complete ones; return all lines, the one to be named last."""
    complete = [line for run, line in pairs if run.state == COMPLETE]
    single = len(curve.runs) == 1
    for run, (tokens, loss) in pairs:
        faded = run.state != COMPLETE
        strength = 0.5 if faded else 0.95 if single else 0.35
        axes.plot(tokens, loss, color=style.colour, ls=style.dash, lw=1.5 if single else 0.7, alpha=strength)
        if faded:
            last = np.flatnonzero(np.isfinite(loss))[-1]
            axes.plot(tokens[last], loss[last], "x", color=style.colour, ms=7, mew=1.8)
    lines = [line for _, line in pairs]
    if single or not complete:
        return sorted(lines, key=lambda line: line[0][-1])
    mean = mean_curve(complete)
    axes.plot(*mean, color=style.colour, ls=style.dash, lw=1.8)
    return [*lines, mean]


def _name(curve: LossCurve) -> str:
    """Return the name of a curve, with the state of a run that is alone and not complete."""
    name, run = short(curve.name), curve.runs[0]
    alone = len(curve.runs) == 1 and run.step is not None
    return f"{name} ({run.state}, step {run.step:,})" if alone and run.state != COMPLETE else name


def _end(name: str, style: Style, line: tuple[Any, Any]) -> End:
    tokens, loss = line
    last = np.flatnonzero(np.isfinite(loss))[-1]
    return End(name, style.colour, float(tokens[last]), float(loss[last]))


def _limit(axes: Any, drawn: Sequence[tuple[Any, Any]]) -> None:
    """Set a range of losses that includes every loss after the start of the panel's longest run."""
    longest = max(float(tokens[-1]) for tokens, _ in drawn)
    axes.set_xlim(0, longest)
    shown = [loss[(tokens >= START * longest) & np.isfinite(loss)] for tokens, loss in drawn]
    values = np.concatenate(shown)
    if values.size:
        margin = 0.05 * (values.max() - values.min()) or 0.1
        axes.set_ylim(values.min() - margin, values.max() + margin)
